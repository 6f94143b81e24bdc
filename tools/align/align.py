"""``specrt align``: acceptance, distances and speed-up by K of a draft on the user's prompts, and a recommendation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean

from rich.console import Console

import specrt
from specrt.engines.errors import UsageError
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import write_text_file
from specrt.runtime.completion import Completion
from specrt.runtime.options import Options, options_of
from specrt.runtime.result import Stats
from specrt.runtime.round import Round
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import settings_of
from specrt.runtime.slots import Slot
from specrt.tools.align.tally import Positions, Tally, compare_rows
from specrt.tools.hashing import checked_manifest
from specrt.tools.prompting.prompts import Prompt, encode_prompts
from specrt.tools.report.folders import without_folders
from specrt.tools.terminal.tables import figures_table
from specrt.tools.tune.timing import time_passes

WORTHWHILE = 1.05  # speed-up over plain; a second model is not worth less
NUM_REJECTED = 10
SEED = 1


@dataclass(frozen=True)
class Rejected:
    """A token that the draft proposed and the target rejected, as texts, and how often."""

    draft: str
    target: str
    count: int


@dataclass(frozen=True)
class Alignment:
    """The result of ``specrt align``; ``tv`` and ``kl`` (nats) are None for n-gram drafts, which have no q.

    The speed-up by K uses passes measured in the same run: ``target_ms[w - 1]`` of w tokens, ``draft_ms`` of one.
    """

    bundle: str
    draft: str
    temperature: float
    num_prompts: int
    num_tokens: int
    acceptance_by_category: dict[str, float]
    acceptance_by_position: tuple[float, ...]
    tv: float | None
    kl: float | None
    rejected: tuple[Rejected, ...]
    target_ms: tuple[float, ...]
    draft_ms: float
    tokens_per_round_by_k: dict[int, float]
    speedup_by_k: dict[int, float]
    verdict: str


def align(
    bundle: Path,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float = 0.0,
    threads: int | None = None,
    progress: Progress = SILENT,
    draft: str | None = None,
) -> Alignment:
    """Measure the bundle's draft on ``prompts``, or ``ngram`` drafts. Raises ``UsageError``."""
    checked_manifest(bundle)
    with specrt.load(bundle, threads=threads) as runtime:
        manifest = runtime.manifest
        draft, k = draft or manifest.draft.kind, manifest.num_speculative_tokens
        if draft == "ngram" and temperature:
            raise UsageError(
                f"--temperature {temperature}: n-gram drafts are verified on greedy text here; leave it out"
            )
        ids = encode_prompts(prompts, bundle, manifest, max_new_tokens)
        tallies = {n: Tally(n) for n in range(1, k + 1)}
        by_category: dict[str, Tally] = {}
        pooled = Positions()
        is_head = draft == "model" and manifest.draft.model is not None and manifest.draft.model.spec.reads_features
        slot = runtime.open_slot("none" if draft == "ngram" else "model")
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            progress.step(prompt.name)
            sampling = {"temperature": temperature, "seed": SEED} if temperature else {}
            output = runtime.generate(prompt_ids, max_new_tokens=max_new_tokens, **sampling).token_ids  # type: ignore[arg-type]
            chosen = [*tallies.values(), by_category.setdefault(prompt.category, Tally(k))]
            if slot.draft is None:
                for tally in chosen:
                    tally.add_ngram(prompt_ids, output)
                continue
            found = compare_rows(slot.target.model, slot.draft.model, prompt_ids, output, temperature)
            _pool(pooled, found)
            run = partial(_rounds, runtime, slot, prompt_ids, max_new_tokens, temperature)
            for tally in chosen:
                tally.add_rounds(run(tally.k)) if is_head else tally.add(found.chances)
        progress.step("timing passes")
        slot.close()
        target_ms, draft_ms = time_passes(runtime)
        draft_ms = 0.0 if draft == "ngram" else draft_ms
        gains = {n: tally.speedup(target_ms, draft_ms) for n, tally in tallies.items()}
        return Alignment(
            bundle=str(bundle),
            draft=draft,
            temperature=temperature,
            num_prompts=len(prompts),
            num_tokens=tallies[k].tokens,
            acceptance_by_category={name: _rate(tally) for name, tally in by_category.items()},
            acceptance_by_position=tuple(tallies[k].acceptance_by_position),
            tv=mean(pooled.tv) if pooled.tv else None,
            kl=mean(pooled.kl) if pooled.kl else None,
            rejected=_rejected(runtime, pooled.rejected),
            target_ms=tuple(target_ms),
            draft_ms=draft_ms,
            tokens_per_round_by_k={n: tally.mean_acceptance_length for n, tally in tallies.items()},
            speedup_by_k=gains,
            verdict=verdict(gains),
        )


def _rounds(
    runtime: Runtime, slot: Slot, prompt: Sequence[int], max_new_tokens: int, temperature: float, k: int
) -> Iterator[Round]:
    """The rounds of one text with K = k, as they run: beyond its first token a head reads its own hidden states."""
    options: Options = {"max_new_tokens": max_new_tokens, "num_speculative_tokens": k, "draft": "model"}
    if temperature:
        options |= {"temperature": temperature, "seed": SEED}
    settings = settings_of(options_of(options), runtime.manifest, True)
    completion = Completion(prompt, settings, runtime.manifest.target.spec.max_seq_len)
    yield from runtime.rounds(slot, completion, Stats())


def verdict(speedup_by_k: dict[int, float]) -> str:
    """``use``, ``use with K = ...`` or ``do not use``, and why. The largest K is the bundle's own."""
    own = max(speedup_by_k)
    best = max(speedup_by_k, key=lambda k: (speedup_by_k[k], -k))
    gain = speedup_by_k[best]
    if gain < WORTHWHILE:
        return f"do not use: at best {gain:.2f} times plain decoding, with K = {best}"
    if speedup_by_k[own] >= 0.98 * gain:
        return f"use: {speedup_by_k[own]:.2f} times plain decoding with the bundle's K = {own}"
    return f"use with K = {best}: {gain:.2f} times plain decoding, {speedup_by_k[own]:.2f} with the bundle's K = {own}"


def _rate(tally: Tally) -> float:
    """accepted / drafted, over all drafted tokens that the target verified, including those after a rejection."""
    drafted = sum(n * count for n, count in tally.by_drafted.items())
    return sum(tally.accepted) / drafted if drafted else 0.0


def _pool(pooled: Positions, found: Positions) -> None:
    pooled.tv += found.tv
    pooled.kl += found.kl
    pooled.rejected.update(found.rejected)


def _rejected(runtime: Runtime, counts: Counter[tuple[int, int]]) -> tuple[Rejected, ...]:
    decode = runtime.codec.decode
    return tuple(Rejected(decode([got]), decode([want]), n) for (got, want), n in counts.most_common(NUM_REJECTED))


def print_alignment(found: Alignment, json_file: Path | None = None) -> None:
    """Print the figures on standard output, the recommendation last; write everything to ``json_file``."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{found.bundle}, draft {found.draft}, temperature {found.temperature:g}: {found.num_tokens} tokens after the "
        f"first of {found.num_prompts} prompts, the target's own text"
    )
    if found.tv is not None:
        at = found.temperature or 1.0
        console.print(f"means at temperature {at:g}: TV(p, q) {found.tv:.3f}, KL(p || q) {found.kl:.3f} nats")
    positions = ", ".join(f"{chance:.2f}" for chance in found.acceptance_by_position)
    console.print(f"acceptance by position, given that those before were accepted: {positions or '-'}")
    by_category = sorted(found.acceptance_by_category.items(), key=lambda item: -item[1])
    shares = [(name, f"{rate:.0%}") for name, rate in by_category]
    console.print(figures_table("accepted / drafted by category", ["category", ""], shares))
    rows = [(str(k), f"{found.tokens_per_round_by_k[k]:.2f}", f"{gain:.2f}") for k, gain in found.speedup_by_k.items()]
    title = f"expected with passes timed here ({found.target_ms[0]:.1f} ms plain)"
    console.print(figures_table(title, ["K", "tokens per round", "times plain"], rows))
    if found.rejected:
        words = [(repr(row.draft), repr(row.target), str(row.count)) for row in found.rejected]
        console.print(figures_table("most frequently rejected", ["draft's token", "target's", "times"], words))
    console.print(f"[bold]{found.verdict}[/bold]")
    if json_file is not None:
        write_text_file(json_file, json.dumps(without_folders(asdict(found)), indent=1) + "\n")
