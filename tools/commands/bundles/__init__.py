"""Commands that make, show or prepare a bundle."""
