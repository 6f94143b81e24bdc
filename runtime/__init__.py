"""Draft, verify, commit, rollback: the torch-free runtime. Meets the exporter only in the bundle."""
