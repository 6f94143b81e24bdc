"""The engines in a bundle, for ``specrt inspect``: what was built; with ``--check``, whether it fits this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from specrt.engines.gpu.discovery import find_gpus
from specrt.engines.manifest import Manifest
from specrt.engines.trt.library import LIBRARIES, check_capability, load_library
from specrt.engines.trt.record import BuildRecord, check_build, engines_folder, record_from_bundle


def builds_of(bundle: Path, manifest: Manifest, check: bool) -> list[BuildRecord]:
    """The records of the engines in ``bundle``; with ``check`` each is compared with this machine.

    Raises ``BackendError`` and ``BundleError`` where engines do not fit or are damaged.
    """
    records = []
    for backend in manifest.backends:
        if backend in LIBRARIES and engines_folder(bundle, backend).is_dir():
            record = record_from_bundle(bundle, backend)
            if check:
                gpus = find_gpus()
                capability = gpus[0].compute_capability if gpus else None
                trt = load_library(backend, manifest.target.spec.dialect)
                if capability is not None:
                    check_capability(backend, trt, capability)
                for notice in check_build(bundle, manifest, record, trt.__version__, capability):
                    click.echo(notice, err=True)
            records.append(record)
    return records


def print_builds(records: Sequence[BuildRecord]) -> None:
    """A table for each build on standard output."""
    for record in records:
        built_for = ", ".join(record.compute_capabilities)
        table = Table(
            title=f"{record.backend}: {record.builder} {record.builder_version}, compute capability {built_for}",
            title_justify="left",
        )
        for column in ("engine", "precision", "MB", "built in", "profiles"):
            table.add_column(column)
        for name, engine in record.engines.items():
            sizes = "; ".join(
                f"{profile}: " + ", ".join(f"{dim} {low}..{high}" for dim, (low, _, high) in dims.items())
                for profile, dims in engine.profiles.items()
            )
            table.add_row(
                name, engine.precision, f"{engine.num_bytes / 1e6:.1f}", f"{engine.build_seconds:.1f} s", sizes
            )
        Console().print(table)
