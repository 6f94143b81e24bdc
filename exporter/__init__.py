"""From a Hugging Face causal LM to the graphs of a bundle."""
