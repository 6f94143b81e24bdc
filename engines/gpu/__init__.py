"""NVIDIA GPUs: the CUDA driver, one device's memory and stream, and bindings in that memory."""
