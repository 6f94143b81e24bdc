"""``python -m specrt.tools.lab.acceptance BUNDLE``: what each accept rule accepts of the same drafts, in closed form.

Text is generated with ``block``. In each round, p and q of every position are at hand, and the expected accepted length
under ``token`` and under ``block`` follows from them and the drafted ids without further draws. At the first position
of each round (whose p and q depend on the committed text alone), the chance of acceptance of one drafted id is compared
between the optimal rule, couplings by common random numbers, and a greedy draft.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import specrt
from specrt.engines.contract import INPUT_IDS, NUM_ACCEPTED, ROW_INDICES
from specrt.engines.interface import Array, Binding
from specrt.engines.numpy_samplers import block_chances, chunk_size
from specrt.engines.samplers import BLOCK, DRAFT_PROBS, PROBS
from specrt.engines.storage.files import write_text_file
from specrt.runtime.result import Stats
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.tools.prompting.prompts import choose_prompts, encode_prompts
from specrt.tools.rounds import run_rounds
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.outputs import OUTPUT_FILE
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import shown_steps

SURVIVORS = 512  # ids by p and by q for which the Gumbel coupling is computed; its formula is quadratic in them


def expected_token(p: Array, q: Array, drafted: Sequence[int]) -> float:
    """Expected accepted length under ``token``, given the drafted ids. p [K + 1, V], q [K, V]"""
    chances = [min(1.0, float(p[i, x]) / float(q[i, x])) for i, x in enumerate(drafted)]
    return float(np.cumprod(chances).sum())


def expected_block(p: Array, q: Array, drafted: Sequence[int]) -> float:
    """Expected accepted length under ``block``: the sum over i of the chance that some h_j with j >= i is hit."""
    missed = 1 - np.array(block_chances(p, q, drafted), np.float64)  # [K]
    return float((1 - np.cumprod(missed[::-1])).sum())


def inverse_cdf_coupling(p: Array, q: Array) -> float:
    """The chance that p and q give the same id by inverse CDF in two levels with the same uniforms."""
    size = chunk_size(len(p))
    both = [np.pad(w.astype(np.float64), (0, -len(w) % size)).reshape(-1, size) for w in (p, q)]  # [N, S] each
    sums = [w.sum(axis=1) for w in both]
    overlaps = _overlaps(*sums)
    chunks = np.flatnonzero(overlaps)
    return float(sum(overlaps[c] * _overlaps(*(w[c] / w[c].sum() for w in both)).sum() for c in chunks))


def gumbel_coupling(p: Array, q: Array) -> float:
    """The chance that argmax(log p + g) and argmax(log q + g) agree with the same noise g for each id.

    For id v it is 1 / sum over w of max(p_w / p_v, q_w / q_v); over the ids that are likely under p or q.
    """
    ids = np.union1d(np.argsort(p)[-SURVIVORS:], np.argsort(q)[-SURVIVORS:])
    p, q = p[ids].astype(np.float64), q[ids].astype(np.float64)
    both = (p > 0) & (q > 0)
    ratios = np.maximum(p[None] / p[both][:, None], q[None] / q[both][:, None])  # [v, w]
    return float((1 / ratios.sum(axis=1)).sum())


def _overlaps(p: Array, q: Array) -> Array:
    """Length of the part of [0, 1) that both distributions map to each id."""
    p_end, q_end = np.cumsum(p) / p.sum(), np.cumsum(q) / q.sum()
    start = np.maximum(np.append(0, p_end[:-1]), np.append(0, q_end[:-1]))
    overlaps: Array = np.maximum(np.minimum(p_end, q_end) - start, 0)
    return overlaps


@dataclass
class Record:
    """Figures of many rounds, one entry a round."""

    token: list[float]
    block: list[float]
    actual: list[int]
    optimal: list[float]
    gumbel: list[float]
    inverse_cdf: list[float]
    greedy: list[float]

    def add(self, head: Binding, num_rows: int) -> None:
        """The round that ``head`` judged."""
        p, q, ids, indices, verdict = head.read(PROBS, DRAFT_PROBS, INPUT_IDS, ROW_INDICES, NUM_ACCEPTED)
        p, q, accepted = p[:num_rows], q[: num_rows - 1], int(verdict[0])
        drafted = ids[0][indices[1:num_rows]].tolist()
        self.token.append(expected_token(p, q, drafted))
        self.block.append(expected_block(p, q, drafted))
        self.actual.append(accepted)
        self.optimal.append(float(np.minimum(p[0], q[0]).sum()))
        self.gumbel.append(gumbel_coupling(p[0], q[0]))
        self.inverse_cdf.append(inverse_cdf_coupling(p[0], q[0]))
        self.greedy.append(float(p[0, q[0].argmax()]))


def measure(runtime: Runtime, prompts: Sequence[Sequence[int]], settings: Settings) -> Record:
    """Generate with ``block`` and keep the figures of every full round."""
    record = Record([], [], [], [], [], [], [])
    slot = runtime.open_slot("model")
    heads = slot.target.heads
    num_drafted = 0

    def between(tokens: list[int], stats: Stats) -> None:
        nonlocal num_drafted
        new, num_drafted = stats.drafted - num_drafted, stats.drafted
        if new == settings.num_speculative_tokens:
            record.add(heads.head(BLOCK), new + 1)

    with shown_steps(len(prompts)) as advance:
        for index, prompt in enumerate(prompts):
            advance(f"T = {settings.temperature}: prompt {index + 1} of {len(prompts)}")
            num_drafted = 0
            run_rounds(runtime, slot, prompt, settings, between)
    slot.close()
    return record


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Mean and the half width of its 95 % interval."""
    array = np.array(values, np.float64)
    return float(array.mean()), float(1.96 * array.std(ddof=1) / math.sqrt(len(array)))


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--temperatures", default="0.7,1.0", show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--k", type=int, default=5, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(2), default=48, show_default=True)
@click.option("--prompts", "wanted", help="A number, 'code', or categories. [default: all]")
@click.option("--threads", type=click.IntRange(1), help="[default: the cores this process may use]")
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write everything to this file.")
def main(
    bundle: Path,
    temperatures: str,
    top_p: float,
    k: int,
    max_new_tokens: int,
    wanted: str | None,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Compare accept rules on BUNDLE's own models, on the same drafts. Its draft must be a model."""
    table = Table(title=f"{bundle}, K = {k}, top-p {top_p:g}", title_justify="left")
    for heading in (
        "T",
        "rounds",
        "token",
        "block",
        "block - token",
        "drawn",
        "1 - TV",
        "Gumbel",
        "inverse CDF",
        "greedy",
    ):
        table.add_column(heading, justify="right")
    stored = {}
    with specrt.load(bundle, threads=threads) as runtime:
        prompts = encode_prompts(choose_prompts(wanted), bundle, runtime.manifest, max_new_tokens)
        for temperature in map(float, temperatures.split(",")):
            settings = Settings(max_new_tokens, k, "model", BLOCK, temperature, top_p=top_p, seed=1)
            record = measure(runtime, prompts, settings)
            stored[str(temperature)] = asdict(record)
            gain, interval = _mean(np.subtract(record.block, record.token).tolist())
            means = [record.optimal, record.gumbel, record.inverse_cdf, record.greedy]
            table.add_row(
                f"{temperature:g}",
                str(len(record.token)),
                *(f"{np.mean(values):.3f}" for values in (record.token, record.block)),
                f"{gain:+.3f} ± {interval:.3f}",
                f"{np.mean(record.actual):.3f}",
                *(f"{np.mean(values):.3f}" for values in means),
            )
    Console().print(table)
    if json_file is not None:
        write_text_file(json_file, json.dumps(stored) + "\n")


if __name__ == "__main__":
    run_process(lambda: main, restarts=True)
