"""One page that needs nothing else: runs, gates, evidence and mutants as a single HTML file, with plots. page.build makes it."""
