"""Parses an ONNX graph to a TensorRT network and checks that the network is equivalent.

The parser drops what it does not support with only a warning, such as an input or the alignment of a causal mask. An
engine built from such a network gives wrong results, so the parsed network is first compared with the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from specrt.engines.contract import Contract, TensorSpec
from specrt.engines.errors import BackendError
from specrt.engines.trt.layers import LISTING
from specrt.engines.trt.library import DTYPES


def make_logger(trt: Any) -> Any:
    """A logger that keeps lines of warnings (``warnings``) and errors (``errors``), and prints none.

    ``listing`` has the builder's messages about an engine's layers (``specrt.engines.trt.layers``).
    """

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.listing: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if message.startswith(LISTING):
                self.listing.append(message)
            if severity <= trt.ILogger.ERROR:
                self.errors.append(" ".join(message.split()))
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(" ".join(message.split()))

    return Logger()


def parse(trt: Any, builder: Any, logger: Any, graph: Path) -> Any:
    """The network of ``graph``. Raises ``BackendError`` that names the first operator that TensorRT refuses."""
    flags = 0
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):  # the only kind from TensorRT 11 on
        flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(graph)):
        reasons = [parser.get_error(i) for i in range(parser.num_errors)]
        reason = f"{reasons[0].node_operator()}: {reasons[0].desc()}" if reasons else "no reason given"
        raise BackendError(
            f"{graph}: {trt.__name__} {trt.__version__} cannot read it ({' '.join(reason.split())}); "
            "export the bundle again, or report this model"
        )
    return network


def inspect_network(trt: Any, network: Any, contract: Contract, warnings: list[str], graph: Path) -> None:
    """Raise ``BackendError`` unless ``network`` matches ``contract`` and all of ``graph`` was parsed."""
    for problem in _problems(trt, network, contract, warnings):
        raise BackendError(
            f"{graph}: the network that {trt.__name__} {trt.__version__} parsed is not the graph: {problem}; "
            "an engine built from it would give wrong results. Install a tested version, or report this model"
        )


def _problems(trt: Any, network: Any, contract: Contract, warnings: list[str]) -> Iterator[str]:
    yield from (line for line in warnings if "unused input" in line.lower())
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    for kind, found, expected in (("input", inputs, contract.inputs), ("output", outputs, contract.outputs)):
        yield from _differences(kind, found, expected)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    used = {t.name for layer in layers for i in range(layer.num_inputs) if (t := layer.get_input(i)) is not None}
    yield from (f"input {tensor.name} is used by no layer" for tensor in inputs if tensor.name not in used)
    yield from _cache_problems(trt, layers, contract)
    yield from _attention_problems(trt, layers)


def _differences(kind: str, found: list[Any], expected: tuple[TensorSpec, ...]) -> Iterator[str]:
    by_name = {tensor.name: tensor for tensor in found}
    for spec in expected:
        tensor = by_name.pop(spec.name, None)
        if tensor is None:
            yield f"{kind} {spec.name} is gone"
            continue
        dtype = DTYPES.get(tensor.dtype.name, tensor.dtype.name)
        shape = tuple(tensor.shape)
        fits = len(shape) == len(spec.shape) and all(
            got == (-1 if isinstance(dim, str) else dim) for got, dim in zip(shape, spec.shape, strict=True)
        )
        if dtype != spec.dtype or not fits:
            yield f"{kind} {spec.name}: got {dtype}{list(shape)}, expected {spec.dtype}{list(spec.shape)}"
    yield from (f"{kind} {name} is not in the contract" for name in by_name)


def _cache_problems(trt: Any, layers: list[Any], contract: Contract) -> Iterator[str]:
    """Each KV output must be a KV cache update of the input whose memory it shares, and no other output may be one."""
    found = {}
    for layer in layers:
        if layer.type == getattr(trt.LayerType, "KV_CACHE_UPDATE", None):
            found[layer.get_output(0).name] = layer.get_input(0).name
    expected = {tensor.name: tensor.alias for tensor in contract.outputs if tensor.alias}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            yield f"{name} is an in-place update of {found.get(name)}, expected {expected.get(name)}"


def allow_decomposition(trt: Any, network: Any) -> bool:
    """Let TensorRT decompose each attention into single operators. False if there is none."""
    attentions = list(_attentions(trt, map(network.get_layer, range(network.num_layers))))
    for _, attention in attentions:
        attention.decomposable = True
    return bool(attentions)


def _attentions(trt: Any, layers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for layer in layers:
        if layer.type == getattr(trt.LayerType, "ATTENTION_INPUT", None):
            layer.__class__ = trt.IAttentionInputLayer  # the Python bindings return every layer as its base class
            yield layer.name, layer.attention


def _attention_problems(trt: Any, layers: list[Any]) -> Iterator[str]:
    for name, attention in _attentions(trt, layers):
        if attention.mask is None:
            yield f"{name} has no mask"
        if _is_causal(trt, attention):
            yield f"{name} is causal by itself, from a corner that is not the text's"


def _is_causal(trt: Any, attention: Any) -> bool:
    """TensorRT has ``causal_kind`` from 11.0 on, and ``causal`` before (anchored at the upper left)."""
    if hasattr(attention, "causal_kind"):
        return bool(attention.causal_kind != trt.CausalMaskKind.NONE)
    return bool(attention.causal)
