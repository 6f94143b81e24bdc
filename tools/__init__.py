"""The command line and what only it needs. Each command imports the other packages lazily."""
