"""A file that imports and registers no kernel."""
