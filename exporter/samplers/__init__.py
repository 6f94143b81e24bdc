"""The heads as ONNX graphs. Their oracles are in numpy (``specrt.engines.numpy_samplers``)."""

from specrt.exporter.samplers.build import head_graph as head_graph
from specrt.exporter.samplers.build import write_heads as write_heads
