"""Polygraphy's runners: a binding of ours, and a function of the inputs.

Imported where Polygraphy is installed (``specrt.tools.compare.comparator``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from specrt.engines.interface import Binding, Engine
from specrt.tools.compare.feeding import infer
from specrt.tools.compare.graphs import Feed, Graph, passes_of


class _Runner(BaseRunner):  # type: ignore[misc]
    """A runner that takes the inputs of a graph's passes, and gives the outputs that are compared."""

    def __init__(self, name: str, graph: Graph) -> None:
        super().__init__(name=name)
        self._graph = graph

    def get_input_metadata_impl(self) -> Any:
        """See ``BaseRunner``: symbolic dimensions are open."""
        metadata = TensorMetadata()
        for tensor in self._graph.contract.inputs:
            if tensor.name in self._graph.feeds[0]:
                shape = [dim if isinstance(dim, int) else None for dim in tensor.shape]
                metadata.add(tensor.name, dtype=tensor.dtype, shape=shape)
        return metadata

    def infer_impl(self, feed_dict: Feed) -> Any:
        """See ``BaseRunner``."""
        started = time.perf_counter()
        outputs = self._outputs(feed_dict)
        self.inference_time = time.perf_counter() - started
        return OrderedDict((name, outputs[name]) for name in self._graph.tolerances)

    def _outputs(self, feed: Feed) -> Feed:
        raise NotImplementedError


class BindingRunner(_Runner):
    """An engine behind specrt's interface, in one binding from activation on: its KV cache grows from pass to pass."""

    def __init__(self, name: str, graph: Graph, load: Callable[[], Engine]) -> None:
        super().__init__(name, graph)
        self._load = load
        self._binding: Binding | None = None

    def activate_impl(self) -> None:
        """See ``BaseRunner``."""
        self._binding = self._load().open()

    def deactivate_impl(self) -> None:
        """See ``BaseRunner``."""
        if self._binding is not None:
            self._binding.close()
            self._binding = None

    def _outputs(self, feed: Feed) -> Feed:
        assert self._binding is not None, "a runner infers only while it is active"
        outputs: Feed = {}
        for part in passes_of(self._graph.contract, feed):
            outputs = infer(self._binding, self._graph.contract, part)
        return outputs


class FunctionRunner(_Runner):
    """The graph's reference: the sampler in numpy, or the logits that a bundle stores."""

    def _outputs(self, feed: Feed) -> Feed:
        return self._graph.reference(feed)
