"""EAGLE-3 draft heads: their files, their module in torch, and which variant of it a head was trained as."""
