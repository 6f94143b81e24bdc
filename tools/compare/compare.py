"""``specrt compare``: samplers and models of a bundle through Polygraphy's ``Comparator``.

On a GPU the bundle's backend is compared with ONNX Runtime on the CPU, which runs the same graphs. Without one ONNX
Runtime is compared with the samplers in numpy, and with the torch model's logits that the bundle stores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrt.engines.backends import choose_backend, choose_device, open_backend
from specrt.engines.errors import BackendError
from specrt.engines.gpu.device import open_device
from specrt.engines.gpu.discovery import find_gpus
from specrt.engines.interface import CPU, CUDA, Backend, Engine
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.processor import available_cores
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.integrity import check_files
from specrt.tools.compare.graphs import IN_NUMPY, NO_CPU_KERNELS, STORED, Graph, graphs_of

INSTALL = "pip install 'specrt[polygraphy]'"
ON_CPU = "onnxruntime on the CPU"


@dataclass(frozen=True)
class OutputResult:
    """One output of a graph: its largest differences over all passes, the limit, and whether all are within it."""

    graph: str
    output: str
    passes: int
    max_abs_difference: float
    max_rel_difference: float
    tolerance: float
    passed: bool


@dataclass(frozen=True)
class Comparison:
    """What was compared with what; ``notes`` say what was not."""

    first: str
    second: str
    results: tuple[OutputResult, ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> list[str]:
        """Graph and output of what differs by more than its limit."""
        return [f"{result.graph}: {result.output}" for result in self.results if not result.passed]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(
    bundle: Path,
    backend: str | None = None,
    device: str | None = None,
    progress: Progress = SILENT,
    verbose: bool = False,
) -> Comparison:
    """Compare every graph of ``bundle``. ``verbose`` prints Polygraphy's own report of each to standard error.

    Without ``backend`` and ``device`` the GPU is used where there is one. Raises ``BackendError`` where Polygraphy is
    missing, and for a backend that is asked for and does not run here.
    """
    if importlib.util.find_spec("polygraphy") is None:
        raise BackendError(f"compare: polygraphy is not installed; {INSTALL}")
    from specrt.tools.compare.comparator import compared

    manifest = manifest_from_bundle(bundle)
    opened = _open_gpu(bundle, manifest, backend, device)
    check_files(bundle, manifest)
    results: list[OutputResult] = []
    for graph in graphs_of(bundle, manifest, has_reference=opened is None):
        progress.step(graph.path)
        on_gpu = None if opened is None else _loader(opened, graph)
        results += compared(graph, _on_cpu(bundle, graph), on_gpu, verbose)
    place = None if opened is None else f"{opened.name} on a GPU"
    first, second = (ON_CPU, place) if place else (f"{IN_NUMPY} and {STORED}", ON_CPU)
    return Comparison(first, second, tuple(results), tuple(_notes(manifest, place)))


def _notes(manifest: Manifest, place: str | None) -> list[str]:
    notes = [] if place else [f"no GPU was used: {ON_CPU} was compared with {IN_NUMPY} and {STORED}"]
    for role, entry in (("target", manifest.target), ("draft", manifest.draft.model)):
        if entry is not None and entry.spec.dtype == NO_CPU_KERNELS:
            notes.append(f"{role}: its graph was not compared, the CPU has no {NO_CPU_KERNELS} kernels")
    return notes


def _open_gpu(bundle: Path, manifest: Manifest, backend: str | None, device: str | None) -> Backend | None:
    """The backend on the GPU; None where ONNX Runtime's CPU provider is compared with numpy."""
    name = choose_backend(manifest, backend)
    if backend is None and device is None:
        place = CPU
        if find_gpus():
            place = CUDA
    else:
        place = choose_device(name, device)
    if place == CPU:
        return None
    open_device()  # a GPU that is missing comes before engines that are
    return open_backend(bundle, manifest, name, place)


def _on_cpu(bundle: Path, graph: Graph) -> Callable[[], Engine]:
    from specrt.engines.ort.cpu import OrtEngine

    return lambda: OrtEngine(bundle / graph.path, graph.contract, available_cores())


def _loader(opened: Backend, graph: Graph) -> Callable[[], Engine]:
    return lambda: opened.load(graph.path, graph.contract)
