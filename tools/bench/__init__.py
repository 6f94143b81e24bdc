"""``specrt bench``: methods measured on the same prompts."""
