"""``specrt gpu-check``: ten experiments that show what a GPU does with a small kit of seeded bundles."""
