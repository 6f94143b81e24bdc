"""``specrt doctor``: versions, providers, GPUs, and what can be exported, built and run on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from specrt import __version__
from specrt.engines.codec import to_json
from specrt.engines.errors import BackendError, ResourceError
from specrt.engines.gpu.discovery import Gpu, find_gpus
from specrt.engines.gpu.driver import INSTALL, open_cuda
from specrt.engines.trt.library import LIBRARIES, check_capability, load_library

# Distributions whose versions matter, and how to install them.
_DISTRIBUTIONS = {
    "numpy": "pip install specrt",
    "tokenizers": "pip install specrt",
    "onnxruntime": "pip install 'specrt[cpu]'",
    "onnxruntime-gpu": "pip install 'specrt[gpu]'",
    "cuda-bindings": INSTALL,
    "torch": "pip install 'specrt[export]'",
    "transformers": "pip install 'specrt[export]'",
    "onnx": "pip install 'specrt[export]'",
    "tensorrt-rtx": LIBRARIES["tensorrt-rtx"].install,
    "tensorrt": LIBRARIES["tensorrt"].install,
}
_EXPORT_MODULES = ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnx_ir", "gguf")
_CPU_PROVIDER = "CPUExecutionProvider"


@dataclass(frozen=True)
class Ability:
    """One function of specrt: whether it works here, and if not, why and how to fix it."""

    name: str
    possible: bool
    reason: str
    fix: str | None


@dataclass(frozen=True)
class Diagnosis:
    """The machine and its libraries; a version is None where a library is not installed."""

    specrt: str
    python: str
    system: str
    versions: dict[str, str | None]
    install: dict[str, str]
    providers: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    abilities: tuple[Ability, ...]

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = to_json(self)
        return result


def examine() -> Diagnosis:
    """Examine this machine. Loads ONNX Runtime, TensorRT and CUDA where they are installed; runs nothing on them."""
    versions = {name: _version(name) for name in _DISTRIBUTIONS}
    providers, gpus = _providers(), find_gpus()
    return Diagnosis(
        __version__,
        platform.python_version(),
        f"{platform.system()} {platform.machine()}",
        versions,
        {name: command for name, command in _DISTRIBUTIONS.items() if versions[name] is None},
        providers,
        gpus,
        tuple(_abilities(providers, gpus)),
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _providers() -> tuple[str, ...]:
    if importlib.util.find_spec("onnxruntime") is None:
        return ()
    import onnxruntime

    return tuple(onnxruntime.get_available_providers())


def _abilities(providers: tuple[str, ...], gpus: tuple[Gpu, ...]) -> Iterator[Ability]:
    missing = [name for name in _EXPORT_MODULES if importlib.util.find_spec(name) is None]
    fix = None if not missing else "pip install 'specrt[export]'"
    if sys.version_info < (3, 11):
        yield Ability("export", False, "it needs Python 3.11 or later", None)
    else:
        yield Ability("export", not missing, f"missing: {', '.join(missing)}" if missing else "", fix)
    has_cpu = _CPU_PROVIDER in providers
    reason = "" if has_cpu else "onnxruntime is not installed"
    yield Ability("run with onnxruntime (CPU)", has_cpu, reason, None if has_cpu else "pip install 'specrt[cpu]'")
    for backend in LIBRARIES:
        yield _can_build(backend, gpus)
    yield _can_run_on_cuda(providers, gpus)
    yield _can_run_on_rtx(providers, gpus)
    for backend in LIBRARIES:
        yield _can_run(backend, gpus)


def _can_build(backend: str, gpus: tuple[Gpu, ...]) -> Ability:
    library = LIBRARIES[backend]
    try:
        load_library(backend)
    except BackendError as error:
        reason = str(error).removeprefix(f"backend {backend}: ").removesuffix(f"; {library.install}")
        return Ability(f"build for {backend}", False, reason, library.install)
    if not library.is_portable and not gpus:
        return Ability(f"build for {backend}", False, "it builds on the GPU that runs it, and none is found", None)
    return Ability(f"build for {backend}", True, "", None)


def _can_run_on_cuda(providers: tuple[str, ...], gpus: tuple[Gpu, ...]) -> Ability:
    """The provider is loaded, with CUDA and cuDNN."""
    name = "run with onnxruntime (CUDA)"
    if (reason := _no_cuda(gpus)) is not None:
        return Ability(name, False, *reason)
    if not providers:
        return Ability(name, False, "onnxruntime is not installed", "pip install 'specrt[gpu]'")
    from specrt.engines.ort.cuda import INSTALL as ORT_INSTALL
    from specrt.engines.ort.cuda import check_provider

    try:
        check_provider()
    except BackendError as error:
        cause = str(error).removeprefix("device cuda: ").removesuffix(f"; {ORT_INSTALL}")
        return Ability(name, False, cause, ORT_INSTALL)
    return Ability(name, True, "", None)


def _can_run_on_rtx(providers: tuple[str, ...], gpus: tuple[Gpu, ...]) -> Ability:
    """The plugin provider is registered, and finds a GPU."""
    name = "run with onnxruntime-rtx"
    if (reason := _no_cuda(gpus)) is not None:
        return Ability(name, False, *reason)
    if not providers:
        return Ability(name, False, "onnxruntime is not installed", "pip install 'specrt[onnxruntime-rtx]'")
    from specrt.engines.ort.rtx import BACKEND, find_devices

    try:
        find_devices()
    except BackendError as error:
        said, _, fix = str(error).removeprefix(f"backend {BACKEND}: ").partition("; ")
        return Ability(name, False, said, fix)
    return Ability(name, True, "", None)


def _can_run(backend: str, gpus: tuple[Gpu, ...]) -> Ability:
    name = f"run with {backend}"
    if (reason := _no_cuda(gpus)) is not None:
        return Ability(name, False, *reason)
    built = _can_build(backend, gpus)
    if not built.possible:
        return Ability(name, False, built.reason, built.fix)
    try:
        check_capability(backend, load_library(backend), gpus[0].compute_capability)
    except BackendError as error:
        said, _, fix = str(error).removeprefix(f"backend {backend}: ").partition("; ")
        return Ability(name, False, said, fix)
    return Ability(name, True, "", None)


def _no_cuda(gpus: tuple[Gpu, ...]) -> tuple[str, str | None] | None:
    """Why nothing runs on a GPU, and how to fix it; None if something may."""
    if not gpus:
        return "no NVIDIA GPU is found", None
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed", INSTALL
    try:
        open_cuda()
    except (BackendError, ResourceError) as error:
        return str(error).removeprefix("device cuda: "), None
    return None


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print the diagnosis as plain lines on standard output, so that commands can be copied."""
    console = Console()

    def show(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    show(f"specrt {diagnosis.specrt}, Python {diagnosis.python}, {diagnosis.system}")
    for name, version in diagnosis.versions.items():
        show(f"  {name}: {version or 'not installed; ' + diagnosis.install[name]}")
    show(f"ONNX Runtime's providers: {', '.join(diagnosis.providers) or 'none'}")
    for gpu in diagnosis.gpus:
        show(
            f"GPU: {gpu.name}, compute capability {gpu.compute_capability}, driver {gpu.driver}, "
            f"{'memory not known' if gpu.memory_bytes is None else f'{gpu.memory_bytes / 1e9:.0f} GB'}"
        )
    if not diagnosis.gpus:
        show("GPU: none found")
    for ability in diagnosis.abilities:
        answer = "yes" if ability.possible else f"no: {ability.reason}"
        show(f"{ability.name}: {answer}{'; ' + ability.fix if ability.fix else ''}")
