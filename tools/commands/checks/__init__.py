"""Commands that check or measure a bundle or the machine."""
