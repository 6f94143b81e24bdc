"""Files on disk: written whole or not at all, folders that appear at the end, caches, and checksums."""
