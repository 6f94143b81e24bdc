"""Model sources: find a model, read its files, and check the loaded weights against them."""
