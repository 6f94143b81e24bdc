"""The backends of this machine's GPU that can run a bundle of the kit, and why others cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specrt.engines.backends import open_backend
from specrt.engines.contract import Contract, model_contract
from specrt.engines.errors import BackendError, SpecrtError
from specrt.engines.gpu import device
from specrt.engines.interface import CUDA, Backend, Engine
from specrt.engines.manifest import Manifest, ModelEntry, manifest_from_bundle
from specrt.engines.progress import SILENT
from specrt.engines.samplers import sampler_contract
from specrt.engines.trt.build import build
from specrt.engines.trt.library import LIBRARIES, load_library
from specrt.engines.trt.record import check_build, record_from_bundle
from specrt.tools.gpu_check.experiment import Failed, Notes, Skip
from specrt.tools.gpu_check.kit import Kit, fill


@dataclass(frozen=True)
class Place:
    """A bundle on a backend that runs it on the GPU."""

    name: str
    bundle: Path
    manifest: Manifest
    backend: Backend

    def model(self, role: str = "target") -> tuple[ModelEntry, Engine]:
        """The model in ``role``, loaded."""
        entry = self.manifest.target if role == "target" else self.manifest.draft.model
        if entry is None:
            raise Skip("needs a bundle with a draft model")
        return entry, self.backend.load(entry.graph, model_contract(entry.spec))

    def sampler(self, name: str) -> tuple[Contract, Engine]:
        """A sampler of the target, loaded, and its contract."""
        entry = self.manifest.target
        contract = sampler_contract(name, entry.spec, entry.spec.vocab_size)
        return contract, self.backend.load(entry.samplers[name], contract)


def on_tensorrt(
    bundle: Path, name: str, is_target_alone: bool = False, has_decode_profile: bool | None = None
) -> Place:
    """``bundle`` on TensorRT or TensorRT-RTX; its engines are built here if there are none that fit this GPU.

    ``is_target_alone``: neither the draft nor samplers. ``has_decode_profile`` is ``build``'s. Raises ``BackendError``.
    """
    manifest = manifest_from_bundle(bundle)
    trt = load_library(name, manifest.target.spec.dialect)
    capability = device.open_device().api.compute_capability
    fill(bundle)
    try:
        check_build(bundle, manifest, record_from_bundle(bundle, name), trt.__version__, capability)
    except SpecrtError:
        named = [capability] if LIBRARIES[name].is_portable else ()
        build(bundle, name, named, True, SILENT, has_decode_profile, is_target_alone)
    return Place(name, bundle, manifest, open_backend(bundle, manifest, name, CUDA))


def on_onnxruntime(bundle: Path) -> Place:
    """``bundle`` on ONNX Runtime's CUDA provider. Raises ``BackendError``."""
    from specrt.engines.ort.cuda import check_provider

    check_provider()
    manifest = manifest_from_bundle(bundle)
    return Place("onnxruntime", bundle, manifest, open_backend(bundle, manifest, "onnxruntime", CUDA))


def openers(kit: Kit) -> Iterator[tuple[str, Callable[[], Place]]]:
    """Each backend that the pair of ``kit`` was exported for, and how to open it."""
    if kit.standard is not None or kit.standard_22 is not None:
        yield from ((name, partial(_pair_on_tensorrt, kit, name)) for name in LIBRARIES)
    if (plain := kit.onnxruntime) is not None:
        yield "onnxruntime", lambda: on_onnxruntime(plain)


def _pair_on_tensorrt(kit: Kit, name: str) -> Place:
    """The pair in the first dialect that the library has what it takes to run."""
    reasons = []
    for bundle in (kit.standard, kit.standard_22):
        if bundle is None:
            continue
        try:
            load_library(name, manifest_from_bundle(bundle).target.spec.dialect)
        except BackendError as error:
            reasons.append(error)
        else:
            return on_tensorrt(bundle, name)
    raise reasons[0]


def on_each(kit: Kit, notes: Notes, examine: Callable[[Place], object]) -> None:
    """``examine`` the pair on each backend that opens here, recording what it returns by the backend's name.

    Raises ``Skip`` with every reason where none opens, ``Failed`` with what failed on any.
    """
    closed, failed, num_open = {}, {}, 0
    for name, opened in openers(kit):
        try:
            place = opened()
        except SpecrtError as error:
            closed[name] = str(error)
            notes.add("not opened", closed)
            continue
        num_open += 1
        try:
            notes.add(name, examine(place))
        except (Failed, SpecrtError) as error:
            failed[name] = str(error)
    if failed:
        raise Failed("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    if not num_open:
        raise Skip("; ".join(closed.values()))
