"""Where a failure is, and which fault would explain it (docs/localiser.md). diagnose.py is what trials ask."""
