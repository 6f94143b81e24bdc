"""ONNX Runtime: the CPU provider and the CUDA provider."""
