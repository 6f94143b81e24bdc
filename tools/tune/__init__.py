"""``specrt tune``: times of passes and acceptance on this machine."""
