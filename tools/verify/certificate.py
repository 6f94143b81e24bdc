"""``specrt verify``: checks of a bundle on this machine, without torch, and a certificate of the results."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import specrt
from specrt.engines.processor import available_cores
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import check_writable, write_text_file
from specrt.tools.hashing import checked_manifest
from specrt.tools.machine import describe_machine
from specrt.tools.prompting.prompts import encode_own_or_ours
from specrt.tools.report.folders import without_folders
from specrt.tools.verify import checks, distribution
from specrt.tools.verify.checks import Check, Subject
from specrt.tools.verify.source_check import NOT_COMPARED, check_sources, check_usage, roles_compared

NUM_PROMPTS = 4


@dataclass(frozen=True)
class Certificate:
    """The checks, the machine and backend, and the results.

    ``sources_compared`` are the models (``target``, ``draft``) whose files were compared with what was exported.
    """

    bundle: str
    target: str
    draft: str
    specrt_version: str
    versions: dict[str, str]
    backend: str
    device: str
    machine: str
    created_utc: str
    seconds: float
    sources_compared: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The certificate as JSON, without this machine's folders."""
        return {"passed": self.passed, **without_folders(asdict(self))}


# In this order: what each rests on comes before it.
CHECKS: tuple[tuple[str, Callable[[Subject], list[Check]]], ...] = (
    ("logits against the reference", checks.check_reference),
    ("one row against several", checks.check_rows),
    ("the same bits in passes of two rows or more", checks.check_bits),
    ("greedy ids", checks.check_greedy),
    ("the target as its own draft", checks.check_self_draft),
    ("seed-exact ids", checks.check_seeds),
    ("caches, with stale slots poisoned", checks.check_caches),
    ("first tokens, chi-square", distribution.check_first_tokens),
)

HINT = "choose a file with --output"


def certify(
    bundle: Path,
    place: Mapping[str, Any] | None = None,
    prompts: Path | None = None,
    max_new_tokens: int = 32,
    num_draws: int = 4000,
    output: Path | None = None,
    progress: Progress = SILENT,
    source: str | None = None,
    draft_source: str | None = None,
) -> Certificate:
    """Run all checks and store the certificate: at ``output``, or next to the bundle as ``NAME.certificate.json``.

    ``place`` says where to run, by the keywords of ``specrt.load``; ``progress`` gets a step for each of ``CHECKS``,
    and a line when it is done: on a large model they take minutes. ``source`` and ``draft_source`` are models whose
    files are compared with what was exported (``specrt.tools.verify.source_check``). Raises ``UsageError`` for
    prompts that do not fit, and ``ResourceError`` when the certificate cannot be written there.
    """
    output = output or bundle.absolute().with_name(f"{bundle.absolute().name}.certificate.json")
    check_writable(output, HINT, "the certificate")
    started = time.perf_counter()
    check_usage(checked_manifest(bundle), source, draft_source)
    with specrt.load(bundle, **(place or {})) as runtime:
        manifest = runtime.manifest
        ids = encode_own_or_ours(prompts, bundle, manifest, max_new_tokens + 8, NUM_PROMPTS)
        subject = Subject(bundle, runtime, ids, max_new_tokens, num_draws)
        found: list[Check] = []
        found += check_sources(manifest, source, draft_source, progress)
        for name, check in CHECKS:
            progress.step(name)
            found += check(subject)
            progress.note(f"{name}: {_outcome(found)}, after {time.perf_counter() - started:.0f} s")
        certificate = Certificate(
            bundle=str(bundle),
            target=manifest.target.source,
            draft=manifest.draft.model.source if manifest.draft.model else manifest.draft.kind,
            specrt_version=specrt.__version__,
            versions=manifest.versions,
            backend=runtime.backend,
            device=runtime.device,
            machine=str(describe_machine((place or {}).get("threads") or available_cores(), watch_seconds=0.0)),
            created_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - started, 1),
            sources_compared=roles_compared(found),
            checks=tuple(found),
        )
    write_text_file(output, json.dumps(certificate.as_dict(), indent=1) + "\n", HINT)
    return certificate


def _outcome(found: Sequence[Check]) -> str:
    failed = [check.name for check in found if not check.passed]
    return f"FAILED so far: {', '.join(failed)}" if failed else "passed"


def print_certificate(certificate: Certificate) -> None:
    """Print the checks as a table on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{certificate.bundle}: target {certificate.target}, draft {certificate.draft}", markup=False)
    console.print(f"{certificate.machine}; specrt {certificate.specrt_version}, {certificate.backend}", markup=False)
    if not certificate.sources_compared:
        console.print(NOT_COMPARED, markup=False)
    table = Table()
    for heading in ("check", "what was compared", "found", "passed"):
        table.add_column(heading, overflow="fold")
    for check in certificate.checks:
        table.add_row(check.name, check.what, check.found, "yes" if check.passed else "NO")
    Console(highlight=False).print(table)
    verdict = "passed" if certificate.passed else "FAILED"
    console.print(f"{verdict}: {len(certificate.checks)} checks in {certificate.seconds:.0f} s", markup=False)
