"""Commands that make a bundle or describe one."""
