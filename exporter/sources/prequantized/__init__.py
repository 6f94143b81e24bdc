"""Checkpoints of quantized weights, read without the packages that wrote them. See docs/checkpoints.md."""
