"""Training of drafts for a target: the text that it writes, its hidden states, and the training on them."""
