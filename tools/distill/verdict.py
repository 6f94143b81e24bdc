"""Whether the trained draft is worth using on this machine: ``specrt align`` of it, of n-grams and of ``self:int4``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specrt.engines.errors import UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.progress import Progress
from specrt.tools.align.align import WORTHWHILE, Alignment, align
from specrt.tools.distill.source import Source
from specrt.tools.prompting.prompts import Prompt, encode_prompts

HEAD, NGRAM, SELF = "eagle3", "ngram", "self:int4"
VERDICT_TOKENS = 48  # of an answer


@dataclass(frozen=True)
class Verdict:
    """``found``: the alignment of each draft by its name. ``text``: ``use`` or ``do not use``, and why."""

    found: dict[str, Alignment]
    text: str


def export_pair(source: Source, output: Path, draft: str) -> None:
    """Export the target with ``draft``: as in its bundle, or by default.

    The variant of a head is that of its training, so that a weak head is exported too, and measured.
    """
    from specrt.exporter.export import export

    export(source.options(output, draft=draft, **_variant(draft)))


def _variant(draft: str) -> dict[str, Any]:
    """``taps`` and ``norm`` of a head that was trained here; nothing for another draft."""
    kind, _, folder = draft.partition(":")
    if kind != HEAD:
        return {}
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return {"taps": tuple(config["eagle_aux_hidden_state_layer_ids"]), "norm": ("fc-each",)}


def judge(
    name: str,
    pair: Path,
    others: Mapping[str, Path],
    prompts: Sequence[Prompt],
    threads: int | None,
    progress: Progress,
) -> Verdict:
    """Align the pair's draft ``name``, n-grams, and the drafts of ``others`` by name on ``prompts``."""
    found: dict[str, Alignment] = {}
    for draft, bundle in {name: pair, NGRAM: pair, **others}.items():
        progress.step(f"measuring {draft}")
        found[draft] = align(bundle, prompts, VERDICT_TOKENS, threads=threads, draft=NGRAM if draft == NGRAM else None)
    return Verdict(found, verdict_of(name, {draft: best_gain(alignment)[1] for draft, alignment in found.items()}))


def fitting(prompts: Sequence[Prompt], bundle: Path) -> list[Prompt]:
    """The prompts that fit into the bundle's context. Raises ``UsageError`` if none does."""
    manifest, found, reason = manifest_from_bundle(bundle), list[Prompt](), ""
    for prompt in prompts:
        try:
            encode_prompts([prompt], bundle, manifest, VERDICT_TOKENS)
            found.append(prompt)
        except UsageError as error:
            reason = str(error)
    if not found:
        raise UsageError(f"{bundle}: no prompt to measure with ({reason})")
    return found


def best_gain(alignment: Alignment) -> tuple[int, float]:
    """(K, times plain decoding) of the best K."""
    return max(alignment.speedup_by_k.items(), key=lambda item: item[1])


def verdict_of(name: str, gains: Mapping[str, float]) -> str:
    """The verdict on draft ``name`` from the speed of each draft over plain decoding."""
    own = gains[name]
    better = max((draft for draft in gains if draft != name), key=lambda draft: gains[draft])
    if own < WORTHWHILE:
        return f"do not use on this machine: {own:.2f} times plain decoding"
    if gains[better] > own:
        return f"do not use on this machine: {own:.2f} times plain decoding, {better} gives {gains[better]:.2f}"
    return f"use on this machine: {own:.2f} times plain decoding, {better} gives {gains[better]:.2f}"


def print_verdict(verdict: Verdict) -> None:
    """Print a table of the drafts, and the verdict, on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(title="each draft alone, expected with passes timed here", title_justify="left")
    for heading in ("draft", "accepted by position", "best K", "tokens per round", "times plain"):
        table.add_column(heading, justify="left" if heading == "draft" else "right")
    table.add_row("none", "", "", "1.00", "1.00")
    for name, found in verdict.found.items():
        k, gain = best_gain(found)
        positions = " ".join(f"{chance:.2f}" for chance in found.acceptance_by_position[:3])
        table.add_row(name, positions, str(k), f"{found.tokens_per_round_by_k[k]:.2f}", f"{gain:.2f}")
    console.print(table)
    console.print(f"[bold]{verdict.text}[/bold]")
