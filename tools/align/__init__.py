"""``specrt align``: how well a draft predicts a target on given prompts."""
