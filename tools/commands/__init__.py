"""One file for each ``specrt`` command: its options, and a call of the function that does the work."""
