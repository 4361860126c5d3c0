"""What is shown: tables and failures made from records. Imported by the command line only."""
