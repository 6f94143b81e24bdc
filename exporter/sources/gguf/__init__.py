"""GGUF files: metadata, config, tokenizer and names of tensors."""
