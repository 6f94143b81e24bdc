"""What the torch model answers, and whether the exported graph answers the same."""
