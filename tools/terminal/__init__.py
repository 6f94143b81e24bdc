"""The process and its terminal: streams, signals, progress, and errors as one line."""
