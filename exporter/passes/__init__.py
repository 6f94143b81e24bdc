"""Graph passes, each ``graph -> graph`` and testable alone."""
