"""Checkpoints whose weights are stored quantized, read without the packages that wrote them: see docs/checkpoints.md."""
