"""Where a model comes from: finding it, reading its files, and whether what was loaded is what they hold."""
