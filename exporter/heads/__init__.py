"""The heads as ONNX graphs. Their oracles are in numpy (``specrt.engines.oracle``)."""

from specrt.exporter.heads.build import head_graph as head_graph
from specrt.exporter.heads.build import write_heads as write_heads
