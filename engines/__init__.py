"""The I/O contract and those who honour it. Imports no sibling package and no torch, transformers or onnx."""
