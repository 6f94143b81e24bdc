"""From a torch model to an ONNX graph that honours the I/O contract."""
