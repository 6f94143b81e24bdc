"""ONNX Runtime behind the interface, on the CPU provider.

Every input and output is bound to memory that the binding owns. KV outputs are bound to the memory of their inputs, so
``GroupQueryAttention`` appends in place. An ``IOBinding`` is kept for each (width, rows) that recurs; where a
contract swaps buffers, for each of their two places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specrt.engines.contract import ROWS, WIDTH, Contract, Dim, plan_buffers
from specrt.engines.errors import BundleError
from specrt.engines.interface import CPU, Array, Backend, Engine, HostBinding, allocate, check_shared
from specrt.engines.ort.library import ort
from specrt.engines.processor import available_cores

_ORT_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
}


def session_options(threads: int, prepack: bool) -> Any:
    """Options of every session: only errors are logged, one pass at a time, no spinning threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads of an idle session must not spin: draft and target take turns on the same cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # Graphs for TensorRT are checked here too: weights are dequantized at load, and activations are not rounded.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _closed(shape: Sequence[Dim | None], expected: tuple[str, tuple[Dim, ...]] | None) -> tuple[Dim | None, ...]:
    """A graph's shape, with unnamed dimensions replaced by those of the contract."""
    if expected is None or len(shape) != len(expected[1]):
        return tuple(shape)
    return tuple(dim if isinstance(dim, int) else wanted for dim, wanted in zip(shape, expected[1], strict=True))


def check_graph(session: Any, contract: Contract, graph: Path) -> None:
    """Raise ``BundleError`` unless the session's graph has the inputs and outputs of ``contract``."""
    for kind, tensors, nodes in (
        ("inputs", contract.inputs, session.get_inputs()),
        ("outputs", contract.outputs, session.get_outputs()),
    ):
        expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
        found = {n.name: (_ORT_TYPES.get(n.type, n.type), _closed(n.shape, expected.get(n.name))) for n in nodes}
        for name in sorted(expected.keys() | found.keys()):
            if found.get(name) != expected.get(name):
                raise BundleError(
                    f"{graph}: {kind} differ from the contract at {name}: "
                    f"got {found.get(name)}, expected {expected.get(name)}; export the bundle again"
                )


# It changes the layout of convolutions, which language models do not have, and onnxruntime 1.32 crashes in it on some
# fp16 graphs.
_DISABLED = ["NchwcTransformer"]


class OrtBackend(Backend):
    """The graphs of ``bundle`` in sessions of ``threads`` (None: all cores)."""

    device = CPU
    cache_path = None

    def __init__(self, name: str, bundle: Path, threads: int | None) -> None:
        self.name, self._bundle, self._threads = name, bundle, threads or available_cores()

    def save_cache(self) -> None:
        """Nothing to do: its kernels are compiled already."""

    def load(self, graph: str, contract: Contract, threads: int | None = None) -> Engine:
        """See ``specrt.engines.interface.Backend.load``."""
        return OrtEngine(self._bundle / graph, contract, threads or self._threads)


class OrtEngine:
    """A graph and its weights in an ONNX Runtime session.

    ``prepack=False`` reads the weights from the mapped file instead of copying them into the kernels' layout. This
    halves the memory, and passes of several rows take about twice as long.

    Raises ``BundleError`` when the graph cannot be loaded or does not have the inputs and outputs of ``contract``.
    """

    def __init__(self, graph: Path, contract: Contract, threads: int, prepack: bool = True) -> None:
        self.contract = contract
        try:
            self.session = ort.InferenceSession(
                str(graph),
                session_options(threads, prepack),
                providers=["CPUExecutionProvider"],
                disabled_optimizers=_DISABLED,
            )
        except Exception as error:  # onnxruntime's exceptions have no common base class
            reason = str(error).splitlines()[0]
            raise BundleError(
                f"{graph}: onnxruntime {ort.__version__} cannot load it ({reason}); export it again"
            ) from error
        check_graph(self.session, contract, graph)

    def open(self, shared: Mapping[str, Array] | None = None) -> OrtBinding:
        """See ``specrt.engines.interface.Engine.open``."""
        return OrtBinding(self, shared or {})


class OrtBinding(HostBinding):
    """The memory and bindings of one slot; see ``specrt.engines.interface.Binding``."""

    # Larger widths, except a full prefill chunk, are the rest of a prompt: they are bound for one pass and not kept.
    KEPT_WIDTHS = 64

    def __init__(self, engine: OrtEngine, shared: Mapping[str, Array]) -> None:
        self._contract = engine.contract
        self._buffers: dict[str, Array] = {}
        for buffer in plan_buffers(self._contract, frozenset(shared)):
            if buffer.owner == "shared":
                check_shared(buffer.name, shared[buffer.name], buffer.shape, buffer.dtype)
                self._buffers[buffer.name] = shared[buffer.name]
            else:
                self._buffers[buffer.name] = allocate(buffer.shape, buffer.dtype)
        self.host: Mapping[str, Array] = MappingProxyType(self._buffers)
        self._turn = 0  # of contracts that swap buffers: 1 after an odd number of passes
        self._bound: dict[tuple[int, int, int], Any] = {}
        self._session: Any = engine.session

    def _bind(self, width: int, rows: int) -> Any:
        limits = self._contract.limits
        if not (1 <= width <= limits[WIDTH] and 1 <= rows <= limits[ROWS]):
            raise ValueError(f"pass of {width} tokens and {rows} rows: at most {limits[WIDTH]} and {limits[ROWS]}")
        dims = {**limits, WIDTH: width, ROWS: rows}
        io = self._session.io_binding()
        for tensor in self._contract.inputs:
            array = self._buffers[tensor.name]
            io.bind_input(tensor.name, "cpu", 0, array.dtype, tensor.resolve(dims), array.ctypes.data)
        for tensor in self._contract.outputs:
            array = self._buffers[tensor.alias or tensor.name]
            io.bind_output(tensor.name, "cpu", 0, array.dtype, tensor.resolve(dims), array.ctypes.data)
        if width <= self.KEPT_WIDTHS or width == limits[WIDTH]:
            self._bound[width, rows, self._turn] = io
        return io

    def run(self, width: int, rows: int) -> None:
        """See ``specrt.engines.interface.Binding.run``."""
        if self._session is None:
            raise RuntimeError("this binding is closed")
        io = self._bound.get((width, rows, self._turn)) or self._bind(width, rows)
        self._session.run_with_iobinding(io)
        if self._contract.swaps:
            self._turn ^= 1
            for written, read in self._contract.swaps:
                self._buffers[written], self._buffers[read] = self._buffers[read], self._buffers[written]

    def close(self) -> None:
        """See ``specrt.engines.interface.Binding.close``."""
        if self._session is not None:
            self._session = None
            self._bound.clear()
            self._buffers.clear()
