"""The samplers as ONNX graphs. Their reference is in numpy (``specrt.engines.numpy_samplers``)."""

from specrt.exporter.samplers.build import sampler_graph as sampler_graph
from specrt.exporter.samplers.build import write_samplers as write_samplers
