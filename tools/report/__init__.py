"""Results of a bench as a page, as charts and as a table."""
