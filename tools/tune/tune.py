"""``specrt tune``: the times of passes on this machine and the acceptance on given prompts, stored next to the bundle.

Times are medians of passes that take turns. Acceptance is that of greedy decoding: the target's text is generated once,
with the bundle's draft model; what an n-gram lookup would draft at each of its tokens follows from the text.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specrt.engines.processor import available_cores
from specrt.engines.progress import Progress
from specrt.engines.storage.files import check_writable
from specrt.runtime.completion import Completion
from specrt.runtime.drafting.acceptance import expected_tokens
from specrt.runtime.drafting.adaptive import ASSUMED, MODEL, NGRAM_LENGTHS, ngram_source
from specrt.runtime.drafting.drafters import NGramDrafter
from specrt.runtime.drafting.tuning import HINT, Tuning, fingerprint, tuning_path, write_tuning
from specrt.runtime.result import Stats
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.tools.align.lookups import look_up
from specrt.tools.hashing import checked_manifest
from specrt.tools.prompting.prompts import encode_own_or_ours
from specrt.tools.terminal.progress import shown_steps
from specrt.tools.tune.timing import time_draft, time_target

PAST = 128  # cached tokens before a measured pass
REPEATS = 5
DRAFT_WIDTHS = (1, 2, 4, 8, 16, 64)
_PRIOR_WEIGHT = 2.0  # rounds that the assumed acceptance rate counts as


@dataclass
class Count:
    """Drafted tokens of one source by position: how many were verified, and how many accepted."""

    verified: list[int]
    accepted: list[int]

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One round."""
        for position in range(min(num_drafted, num_accepted + 1)):
            self.verified[position] += 1
            self.accepted[position] += position < num_accepted

    def rates(self, assumed: float) -> tuple[float, ...]:
        """P(accepted | those before were) by position; positions with few rounds are shrunk towards the mean of all."""
        total = (sum(self.accepted) + _PRIOR_WEIGHT * assumed) / (sum(self.verified) + _PRIOR_WEIGHT)
        return tuple(
            round((hits + _PRIOR_WEIGHT * total) / (verified + _PRIOR_WEIGHT), 4)
            for verified, hits in zip(self.verified, self.accepted, strict=True)
        )


def tune(bundle: Path, prompts: Path | None, max_new_tokens: int, **place: Any) -> Tuning:
    """Measure, store the tuning next to the bundle, and return it. Raises ``ResourceError`` if it cannot be written.

    ``place`` are arguments of ``Runtime``: where target and draft run, and the threads.
    """
    path = tuning_path(bundle)
    check_writable(path, HINT, "the tuning")
    encoded = encode_own_or_ours(prompts, bundle, checked_manifest(bundle), max_new_tokens)
    with Runtime(bundle, **place) as runtime:
        with shown_steps(2 + len(encoded)) as progress:
            progress.step("passes of the target")
            target_ms = time_target(runtime, PAST, REPEATS)
            progress.step("passes of the draft")
            draft_ms = time_draft(runtime, PAST, REPEATS, DRAFT_WIDTHS)
            acceptance = _acceptance(runtime, encoded, max_new_tokens, progress)
        tuning = Tuning(
            fingerprint=fingerprint(bundle, runtime.places, place.get("threads") or available_cores()),
            created_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            target_ms={str(width): round(ms, 3) for width, ms in target_ms.items()},
            draft_ms={str(width): round(ms, 3) for width, ms in draft_ms.items()},
            acceptance=acceptance,
        )
    write_tuning(bundle, tuning)
    return tuning


def _acceptance(
    runtime: Runtime, prompts: Sequence[Sequence[int]], max_new_tokens: int, progress: Progress
) -> dict[str, tuple[float, ...]]:
    """Acceptance by source, from the target's greedy text after each prompt."""
    k = runtime.manifest.num_speculative_tokens
    counts = {source: Count([0] * k, [0] * k) for source in ASSUMED}
    has_model = runtime.manifest.draft.kind != "ngram"
    for number, prompt in enumerate(prompts, 1):
        progress.step(f"prompt {number} of {len(prompts)}")
        slot = runtime.open_slot("model" if has_model else "none")
        ending_ids = runtime.manifest.eos_token_ids
        settings = Settings(max_new_tokens, k, "model" if has_model else "ngram", ending_ids=ending_ids)
        completion = Completion(prompt, settings, runtime.manifest.target.spec.max_seq_len)
        for done in runtime.rounds(slot, completion, Stats()):
            if has_model:
                counts[MODEL].add(len(done.drafted), done.num_accepted)
        slot.close()
        _count_lookups(completion.tokens, len(prompt), k, counts)
    return {source: counts[source].rates(rate) for source, rate in ASSUMED.items() if has_model or source != MODEL}


def _count_lookups(tokens: Sequence[int], num_prompt: int, k: int, counts: Mapping[str, Count]) -> None:
    """Count what a lookup drafts after each token of the text, and how much of it the text continues with."""
    drafter = NGramDrafter(NGRAM_LENGTHS[0], NGRAM_LENGTHS[-1])
    for place in range(num_prompt + 1, len(tokens)):
        found = look_up(drafter, tokens, place, k)
        if found.size:
            counts[ngram_source(found.size)].add(found.num_drafted, found.num_accepted)


def print_tuning(bundle: Path, tuning: Tuning) -> None:
    """Print the times, and for each source the K with the most tokens per second, on standard output."""
    console = Console(highlight=False)
    target = {int(width): ms for width, ms in tuning.target_ms.items()}
    passes = ", ".join(f"{width}: {ms:.1f}" for width, ms in target.items())
    console.print(f"target, ms by tokens in a pass: {passes}", markup=False)
    if tuning.draft_ms:
        passes = ", ".join(f"{width}: {ms:.1f}" for width, ms in tuning.draft_ms.items())
        console.print(f"draft, ms by tokens it is fed: {passes}", markup=False)
    table = Table()
    for heading in ("source", "acceptance by position", "best K", "tokens per round", "tokens/s", "against plain"):
        table.add_column(heading, justify="left" if heading.startswith(("source", "acc")) else "right")
    plain = 1e3 / target[1]
    table.add_row("plain", "", "0", "1.00", f"{plain:.1f}", "1.00x")
    for source, rates in tuning.acceptance.items():
        step = tuning.draft_ms["1"] if source == MODEL else 0.0
        tokens = expected_tokens(rates)
        speed = [tokens[k] / (target[k + 1] + k * step) * 1e3 for k in range(len(tokens))]
        best = max(range(1, len(speed)), key=speed.__getitem__)
        shown = " ".join(f"{rate:.2f}" for rate in rates)
        ratio = speed[best] / plain
        table.add_row(source, shown, str(best), f"{tokens[best]:.2f}", f"{speed[best]:.1f}", f"{ratio:.2f}x")
    console.print(table)
    console.print(
        "ngram-N: a suffix of N or more tokens occurs earlier in the text. Where no K pays off, decoding is plain.\n"
        f"stored in {tuning_path(bundle)}: generate and chat choose K by it each round",
        markup=False,
        soft_wrap=True,
    )
