"""One file for each ``specrt`` command: its options, and a call of what does the work."""
