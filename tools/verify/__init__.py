"""``specrt verify``: checks of a bundle on this machine."""
