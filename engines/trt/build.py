"""``specrt build``: builds TensorRT engines from the graphs of a bundle. Torch-free, as it runs on the target device.

The folder of engines is created atomically, with a record of the build (``specrt.engines.trt.record``).
"""

from __future__ import annotations

import datetime
import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specrt import __version__
from specrt.engines.backends import choose_backend
from specrt.engines.contract import Contract, model_contract
from specrt.engines.errors import BackendError, ResourceError, UsageError
from specrt.engines.gpu.discovery import find_gpus
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.progress import SILENT, Progress
from specrt.engines.samplers import sampler_contract
from specrt.engines.storage.files import write_file, write_text_file
from specrt.engines.storage.folders import check_place, new_folder
from specrt.engines.storage.integrity import check_files
from specrt.engines.trt.decode import Built, OneTokenPasses, choose, described, one_token_passes
from specrt.engines.trt.layers import layers_in
from specrt.engines.trt.library import (
    OTHER_GPUS,
    known_capabilities,
    library_of,
    load_library,
    portable_capabilities,
)
from specrt.engines.trt.network import allow_decomposition, inspect_network, make_logger, parse
from specrt.engines.trt.profiles import Profile, profiles_of, shapes_of
from specrt.engines.trt.record import (
    RECORD_NAME,
    RECORD_VERSION,
    TIMING_CACHE_NAME,
    BuildRecord,
    Candidate,
    EngineEntry,
    engines_folder,
    record_text,
    remember_build,
)


@dataclass(frozen=True)
class _Job:
    """One engine to build: its name, its graph in the bundle, its contract and its profiles.

    ``weights`` are names of files, some of which the bundle may not have; samplers have none. With ``passes``, those of
    one token are measured to decide whether it has ``decode``.
    """

    name: str
    graph: str
    weights: tuple[str, ...]
    contract: Contract
    precision: str
    profiles: dict[str, Profile]
    passes: OneTokenPasses | None = None

    def sources(self, manifest: Manifest) -> dict[str, str]:
        """SHA-256 of the engine's source files, by name."""
        return {name: entry.sha256 for name, entry in manifest.files.items() if name in (self.graph, *self.weights)}


def build(
    bundle: Path,
    backend: str,
    compute_capabilities: Sequence[str] = (),
    force: bool = False,
    progress: Progress = SILENT,
    has_decode_profile: bool | None = None,
    is_target_alone: bool = False,
) -> BuildRecord:
    """Build every engine of ``bundle`` for ``backend``; return the record. A failed build leaves no files.

    ``compute_capabilities`` (as ``8.9``) are for TensorRT-RTX only; without any, the engines run on all that it
    supports except Turing.
    ``has_decode_profile``: whether the models' engines have a profile for passes of one token; None decides for each
    model by bytes (``specrt.engines.trt.decode``). ``is_target_alone``: only the target's engine, to be measured.
    Raises ``SpecrtError``.
    """
    manifest = manifest_from_bundle(bundle)
    library = library_of(choose_backend(manifest, backend))
    folder = engines_folder(bundle, backend)
    if folder.exists() and not force:
        raise UsageError(f"{folder}: engines exist; pass --force to build them again")
    if compute_capabilities and not library.is_portable:
        raise UsageError(
            f"--compute-capability: {library.module} builds for the GPU at hand; leave it out, or use tensorrt-rtx"
        )
    trt = load_library(backend, manifest.target.spec.dialect)
    gpus = find_gpus()
    if not library.is_portable and not gpus:
        raise BackendError(
            f"backend {backend}: it builds on the GPU that will run it and none is found; use tensorrt-rtx"
        )
    built_for = portable_capabilities(trt) if library.is_portable else (gpus[0].compute_capability,)
    builder = _Builder(trt, compute_capabilities, folder, has_timings=not library.is_portable)
    check_place(folder)
    _check_room(bundle, manifest, progress)
    check_files(bundle, manifest)
    with new_folder(folder, progress) as partial:
        jobs = _jobs(manifest, has_decode_profile, library.lists_layers)[: 1 if is_target_alone else None]
        engines = {job.name: builder.build(job, bundle, partial, manifest, progress) for job in jobs}
        builder.save_timings(partial)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        record = BuildRecord(
            RECORD_VERSION,
            __version__,
            created,
            backend,
            library.module,
            trt.__version__,
            tuple(compute_capabilities) or built_for,
            engines,
        )
        write_text_file(partial / RECORD_NAME, record_text(record))
    remember_build(record)
    return record


def build_alone(backend: str, bundle: Path, graph: str, contract: Contract) -> EngineEntry:
    """Build the engine of a ``graph`` in ``bundle`` that its manifest does not have, for the GPU at hand.

    It is put next to the others, and not into their record. Raises ``BackendError``.
    """
    manifest, library = manifest_from_bundle(bundle), library_of(backend)
    capabilities = [gpu.compute_capability for gpu in find_gpus()[:1]] if library.is_portable else []
    folder = engines_folder(bundle, backend)
    builder = _Builder(load_library(backend, manifest.target.spec.dialect), capabilities, folder, has_timings=False)
    job = _Job(Path(graph).stem, graph, (), contract, "float32", profiles_of(contract))
    return replace(builder.build(job, bundle, folder, manifest, SILENT), sources={graph: ""})


def _jobs(manifest: Manifest, has_decode_profile: bool | None, can_measure: bool = False) -> list[_Job]:
    """The models, then their samplers. Samplers that two models share are built once."""
    jobs: dict[str, _Job] = {}
    samplers: dict[str, _Job] = {}
    for role, entry in (("target", manifest.target), ("draft", manifest.draft.model)):
        if entry is None:
            continue
        contract = model_contract(entry.spec)
        passes = one_token_passes(role, entry) if has_decode_profile is None else None
        is_expected = passes is not None and passes.are_expected_to_gain and not can_measure
        profiles = profiles_of(contract, has_decode_profile or is_expected)
        measured = passes if can_measure else None
        jobs[role] = _Job(role, entry.graph, entry.weights, contract, entry.spec.dtype, profiles, measured)
        for name, graph in entry.samplers.items():
            # A draft's chunk may be wider than the target's; a sampler serves both.
            width = max(m.spec.max_width for m in (manifest.target, manifest.draft.model) if m is not None)
            contract = sampler_contract(name, replace(entry.spec, max_width=width), manifest.target.spec.vocab_size)
            stem = graph.removesuffix(".onnx")
            samplers.setdefault(stem, _Job(stem, graph, (), contract, "float32", profiles_of(contract)))
    return [*jobs.values(), *samplers.values()]


def _check_room(bundle: Path, manifest: Manifest, progress: Progress) -> None:
    """Report the disk and memory that the build needs. Raises ``ResourceError`` if the disk is too small."""
    weights = [m.weights_bytes for m in (manifest.target, manifest.draft.model) if m is not None]
    disk, memory = int(sum(weights) * 1.15) + (64 << 20), max(weights) * 4 + (1 << 30)
    progress.note(f"needs about {disk / 1e9:.2f} GB of disk and {memory / 1e9:.2f} GB of memory")
    free = shutil.disk_usage(bundle).free
    if free < disk:
        raise ResourceError(
            f"{bundle}: the engines need about {disk / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; make room"
        )


class _Builder:
    """TensorRT's builder, with the settings of all engines of a build."""

    def __init__(self, trt: Any, compute_capabilities: Sequence[str], folder: Path, has_timings: bool) -> None:
        self._trt = trt
        self._logger = make_logger(trt)
        self._builder = trt.Builder(self._logger)
        self._capabilities = [self._capability(text) for text in compute_capabilities]
        self._has_timings = has_timings
        path = folder / TIMING_CACHE_NAME
        self._timings = path.read_bytes() if path.is_file() else b""

    def _capability(self, text: str) -> Any:
        known = known_capabilities(self._trt)
        if text not in known:
            raise UsageError(
                f"--compute-capability {text}: {self._trt.__name__} {self._trt.__version__} knows {', '.join(known)}; "
                f"{OTHER_GPUS}"
            )
        return known[text]

    def save_timings(self, folder: Path) -> None:
        """Save the timing cache for the next build. TensorRT-RTX has none."""
        if self._timings:
            write_file(folder / TIMING_CACHE_NAME, self._timings)

    def build(self, job: _Job, bundle: Path, folder: Path, manifest: Manifest, progress: Progress) -> EngineEntry:
        """Parse, inspect and build one engine into ``folder``."""
        progress.step(f"{job.name}: building")
        started = time.perf_counter()
        self._logger.errors.clear()
        self._logger.warnings.clear()
        network = parse(self._trt, self._builder, self._logger, bundle / job.graph)
        inspect_network(self._trt, network, job.contract, self._logger.warnings, bundle / job.graph)
        plan, job, candidates = self._chosen(job, network, bundle, progress)
        seconds = time.perf_counter() - started
        file = f"{job.name}.engine"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_file(folder / file, plan)
        sources = job.sources(manifest)
        digest = hashlib.sha256(plan).hexdigest()
        return EngineEntry(
            file, sources, job.precision, job.profiles, plan.nbytes, digest, round(seconds, 2), candidates
        )

    def _chosen(
        self, job: _Job, network: Any, bundle: Path, progress: Progress
    ) -> tuple[memoryview, _Job, tuple[Candidate, ...]]:
        """The engine, the job with its profiles, and what was measured to choose them."""
        if job.passes is None:
            return self._serialize(job, network, bundle, progress), job, ()
        jobs = {has: replace(job, profiles=profiles_of(job.contract, has)) for has in (False, True)}

        def built(has_decode: bool) -> Built:
            plan = self._serialize(jobs[has_decode], network, bundle, progress)
            return Built(plan, has_decode, layers_in(self._logger.listing, list(jobs[has_decode].profiles)))

        chosen, candidates = choose(job.passes, built)
        if candidates:
            progress.note(f"{job.name}: {described(job.passes, candidates, chosen.has_decode)}")
        return chosen.plan, jobs[chosen.has_decode], candidates

    def _serialize(self, job: _Job, network: Any, bundle: Path, progress: Progress) -> memoryview:
        """The engine. Where there is no fused kernel for its attention, TensorRT may take single operators for it."""
        plan = self._built(job, network)
        if plan is None and allow_decomposition(self._trt, network):
            plan = self._built(job, network)
            if plan is not None:
                progress.note(
                    f"{job.name}: {self._trt.__name__} {self._trt.__version__} has no fused kernel for its attention; "
                    "it is built from single operators, which are slower"
                )
        if plan is None:
            reason = self._logger.errors[0] if self._logger.errors else "no reason given"
            raise BackendError(
                f"{bundle / job.graph}: {self._trt.__name__} {self._trt.__version__} cannot build it ({reason[:300]}); "
                "report this model"
            )
        return memoryview(plan)

    def _built(self, job: _Job, network: Any) -> Any:
        """The serialized engine, or None. If the library supports it, the engine does not allocate memory itself."""
        self._logger.listing.clear()
        config = self._builder.create_builder_config()
        if job.passes is not None:
            config.profiling_verbosity = self._trt.ProfilingVerbosity.DETAILED
        if hasattr(self._trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
            config.set_flag(self._trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        if self._capabilities:
            config.num_compute_capabilities = len(self._capabilities)
            for index, capability in enumerate(self._capabilities):
                config.set_compute_capability(capability, index)
        for sizes in job.profiles.values():
            profile = self._builder.create_optimization_profile()
            for name, shapes in shapes_of(job.contract, sizes).items():
                profile.set_shape(name, *shapes)
            config.add_optimization_profile(profile)
        if self._has_timings:
            config.set_timing_cache(config.create_timing_cache(self._timings), ignore_mismatch=False)
        plan = self._builder.build_serialized_network(network, config)
        if plan is not None and self._has_timings:
            self._timings = bytes(config.get_timing_cache().serialize())
        return plan
