"""Where drafted tokens come from, and how many are drafted."""
