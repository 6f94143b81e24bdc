"""Reference logits of the torch model, and the comparison of the exported graph with them."""
