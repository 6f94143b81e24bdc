"""TensorRT and TensorRT-RTX: building engines from a bundle's graphs, and running them."""
