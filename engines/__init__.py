"""The I/O contract and its backends. Imports no sibling package and no torch, transformers or onnx."""
