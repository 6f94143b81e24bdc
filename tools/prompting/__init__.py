"""Prompts from options and files, and the options of a generation."""
