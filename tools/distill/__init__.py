"""``specrt distill``: a draft trained on the text that the target writes."""
