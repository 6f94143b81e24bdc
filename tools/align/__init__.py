"""``specrt align``: how well a draft suits a target on a text."""
