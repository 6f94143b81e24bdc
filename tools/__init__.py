"""The command line and what it alone needs. Imports the other packages lazily, one command at a time."""
