"""From logits to tokens: verification, penalties, random numbers."""
