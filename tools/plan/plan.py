"""``specrt plan``: the predicted memory and speed of a pair on a device, from configs alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specrt.engines.errors import UsageError
from specrt.tools.plan.roofline import Device, ModelCost, Rounds, expected_tokens, pass_s, rounds_of
from specrt.tools.terminal.tables import figures_table

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
KS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
WIDTHS = (1, 2, 4, 6, 9, 17)
MAX_K = KS[-1]


@dataclass(frozen=True)
class Plan:
    """A pair on a device. ``acceptance`` is by position; ``draft`` None means n-gram drafts, at no cost."""

    device: Device
    target: ModelCost
    draft: ModelCost | None
    past: int
    acceptance: tuple[float, ...]
    rounds: Rounds

    @property
    def needed_bytes(self) -> int:
        return sum(model.total_bytes for model in self.models)

    @property
    def models(self) -> list[ModelCost]:
        return [model for model in (self.target, self.draft) if model is not None]

    @property
    def fits(self) -> bool | None:
        """Whether the pair fits into the device's memory; None if that is not known."""
        memory = self.device.memory_bytes
        return None if memory is None else self.needed_bytes <= memory

    def as_dict(self) -> dict[str, Any]:
        """The plan as ``--json`` prints it."""
        best = self.rounds.best_k(self.acceptance)
        speeds = {k: self.rounds.speedup(self.acceptance, k) for k in KS}
        return {
            "device": asdict(self.device),
            "models": [asdict(model) for model in self.models],
            "past": self.past,
            "needed_bytes": self.needed_bytes,
            "fits": self.fits,
            "pass_ms": {
                model.name: {width: pass_s(model, self.device, width, self.past) * 1e3 for width in WIDTHS}
                for model in self.models
            },
            "acceptance": list(self.acceptance),
            "best_k": best,
            "plain_tokens_per_s": 1 / self.rounds.plain_s,
            "tokens_per_s": self.rounds.speedup(self.acceptance, best) / self.rounds.plain_s,
            "speedup": self.rounds.speedup(self.acceptance, best),
            "speedup_by_k": speeds,
            "speedup_by_k_and_acceptance": {k: {a: self.rounds.speedup((a,), k) for a in ACCEPTANCES} for k in KS},
            "break_even_acceptance": {k: self.rounds.break_even(k) for k in KS},
        }


def make_plan(
    device: Device,
    target: ModelCost,
    draft: ModelCost | None,
    past: int | None,
    acceptance: Sequence[float],
) -> Plan:
    """The plan of a pair; ``past`` None assumes that half of the context is filled. Raises ``UsageError``."""
    if not acceptance or not all(0 <= chance <= 1 for chance in acceptance):
        raise UsageError(f"--acceptance: got {list(acceptance)}, expected chances from 0 to 1")
    max_seq_len = target.max_seq_len
    past = max_seq_len // 2 if past is None else past
    if not 0 <= past <= max_seq_len:
        raise UsageError(f"--past: got {past}, expected 0 to the context of {max_seq_len}")
    rounds = rounds_of(target, draft, device, MAX_K, past)
    return Plan(device, target, draft, past, tuple(acceptance), rounds)


def acceptance_from_file(path: Path, has_draft_model: bool = True) -> tuple[float, ...]:
    """Acceptance by position from a file of ``specrt align --json`` or ``specrt bench --json``.

    From a bench it is that of the method ``model``, or ``ngram`` for a plan without a draft model; if that one is
    missing, that of the last method that drafted. Raises ``UsageError``.
    """
    wanted = "model" if has_draft_model else "ngram"
    try:
        stored = json.loads(path.read_text(encoding="utf-8-sig"))
        scores = sorted(reversed(stored.get("scores", [])), key=lambda row: row.get("method") != wanted)
        found = next(row["acceptance_by_position"] for row in (stored, *scores) if row.get("acceptance_by_position"))
        return tuple(float(chance) for chance in found)
    except (OSError, ValueError, AttributeError, TypeError, StopIteration) as error:
        raise UsageError(
            f"--from {path}: no acceptance_by_position in it ({type(error).__name__}); give the --json file of "
            "'specrt align' or 'specrt bench' with a method that drafts"
        ) from error


def print_plan(plan: Plan, notes: Sequence[str] = ()) -> None:
    """Print the plan on standard output, with its assumptions and ``notes``."""
    console = Console(highlight=False, soft_wrap=True)
    checked = f"; {plan.device.checked}" if plan.device.checked else ""
    console.print(f"[bold]{plan.device.name}[/bold] ({plan.device.source}{checked})")
    _print_bytes(console, plan)
    _print_passes(console, plan)
    rounds, best = plan.rounds, plan.rounds.best_k(plan.acceptance)
    shown = ", ".join(f"{chance:.2f}" for chance in plan.acceptance[:8])
    console.print(f"\nplain: {1 / rounds.plain_s:.1f} tokens/s. Acceptance {shown}:")
    if best == 0:
        console.print("[bold]speculation is slower at every K: do not use this draft here[/bold]")
    else:
        gain = rounds.speedup(plan.acceptance, best)
        tokens = expected_tokens(plan.acceptance, best)
        console.print(
            f"[bold]best K = {best}: {gain / rounds.plain_s:.1f} tokens/s, {gain:.2f} times plain[/bold] "
            f"({tokens:.2f} tokens in a round of {rounds.round_s[best] * 1e3:.1f} ms)"
        )
    _print_speedups(console, plan)
    for line in (*assumptions(plan), *notes):
        console.print(f"- {line}")


def assumptions(plan: Plan) -> list[str]:
    """The assumptions of the figures."""
    device = plan.device
    combined = "the longer of memory and arithmetic" if device.overlaps else "memory and arithmetic one after the other"
    draft = (
        "drafts of a model, one token a pass"
        if plan.draft is not None
        else "drafts by n-grams at no cost; their acceptance depends on the text, measure it with 'specrt align'"
    )
    return [
        f"{device.bandwidth_bytes_per_s / 1e9:.0f} GB/s and {device.flops_per_s / 1e12:.2f} TFLOPS in kernels, "
        f"{device.node_overhead_us:.1f} us between two kernels; a pass takes {combined}",
        f"{plan.past} cached tokens; attention costs only the reading of the KV; one sequence at a time",
        f"{draft}; tokens are accepted independently of each other; samplers and loop cost nothing",
        "GPU kernels of quantized weights read as many bytes as ours; a runtime's own workspace is not in the bytes",
    ]


def _print_bytes(console: Console, plan: Plan) -> None:
    headings = ("model", "weights", "KV", "scratch", "all")
    table = figures_table(f"GB, context of {plan.target.max_seq_len} tokens", headings)
    for model in plan.models:
        sizes = (model.weights_bytes, model.kv_bytes, model.scratch_bytes, model.total_bytes)
        table.add_row(model.name, *(f"{size / 1e9:.2f}" for size in sizes))
    console.print(table)
    needed, memory = plan.needed_bytes / 1e9, plan.device.memory_bytes
    if memory is None:
        console.print(f"needs {needed:.1f} GB; the device's memory is not known (--memory)")
    else:
        verdict = "fits" if plan.fits else "[bold]does not fit[/bold]"
        console.print(f"{verdict}: needs {needed:.1f} of {memory / 1e9:.0f} GB")


def _print_passes(console: Console, plan: Plan) -> None:
    table = figures_table("ms of a pass by width", ["model", *map(str, WIDTHS)])
    for model in plan.models:
        times = [pass_s(model, plan.device, width, plan.past) * 1e3 for width in WIDTHS]
        table.add_row(model.name, *(f"{ms:.2f}" for ms in times))
    console.print(table)


def _print_speedups(console: Console, plan: Plan) -> None:
    table = Table(title="times plain, by K and acceptance", title_justify="left")
    table.add_column("K", justify="right")
    for chance in ACCEPTANCES:
        table.add_column(f"{chance:g}", justify="right")
    table.add_column("break-even", justify="right")
    for k in KS:
        gains = [plan.rounds.speedup((chance,), k) for chance in ACCEPTANCES]
        even = plan.rounds.break_even(k)
        cells = [f"[bold]{gain:.2f}[/bold]" if gain >= 1 else f"{gain:.2f}" for gain in gains]
        table.add_row(str(k), *cells, "never" if even is None else f"{even:.2f}")
    console.print(table)
