"""``python -m specrt.tools.lab.grammar_cost``: what a grammar adds to a round of K + 1 rows, on one core.

Texts are walked as a round does it: the draft is cut where the grammar forbids it, its rows of logits are copied and
masked, and what was rejected is rolled back. Once as for sampling, where every row is masked, and once as for greedy
decoding of a model that follows the grammar, where rows whose best id is allowed need no mask.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import click
import numpy as np
from tokenizers import Tokenizer

from specrt.runtime.sampling.grammar import Grammars, Vocabulary
from specrt.runtime.structured import Grammar, grammar_of
from specrt.runtime.text.codec import TextCodec
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process

REPEATS = 20
_STRING = {"type": "string"}
# What a schema has, its properties, and a text of it
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "strings, a number, a list": (
        {
            "name": {**_STRING, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": _STRING, "maxItems": 5},
        },
        {"name": "Ada Lovelace of London", "age": 36, "tags": ["mathematics", "analytical engine", "notes"]},
    ),
    "`pattern` of one class": (
        {"slug": {**_STRING, "pattern": "^[a-z0-9_-]+$"}},
        {"slug": "the_analytical-engine_of_ada_lovelace_1843"},
    ),
    "`pattern` of words": (
        {"name": {**_STRING, "pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)*$"}},
        {"name": "Ada Lovelace London Mathematics Engine Notes"},
    ),
    "`pattern` of an address": (
        {"mail": {**_STRING, "pattern": r"^[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}$"}},
        {"mail": "ada.lovelace.of.london@analytical-engine.example.com"},
    ),
    "`format`: email, date-time, uuid": (
        {"mail": {**_STRING, "format": "email"}, "at": {**_STRING, "format": "date-time"}, "id": {"format": "uuid"}},
        {
            "mail": "ada.lovelace@example.com",
            "at": "1843-12-10T10:20:30Z",
            "id": "123e4567-e89b-12d3-a456-426614174000",
        },
    ),
    "up to a short `maxLength`": (
        {"text": {**_STRING, "maxLength": 12, "minLength": 3}, "more": {**_STRING, "minLength": 5}},
        {"text": "Ada of Lond", "more": "analytical engine and notes"},
    ),
    "`pattern` that may be anywhere": (
        {"text": {**_STRING, "pattern": "engine"}},
        {"text": "the analytical engine of Charles Babbage and Ada Lovelace"},
    ),
}


@dataclass(frozen=True)
class Cost:
    """Times in ms. Rounds are of one text after the other; the first text of all warms the matcher."""

    compile_ms: float
    sampled_ms: list[float]
    greedy_ms: list[float]
    num_forced: int
    num_tokens: int


def case_of(name: str) -> tuple[Grammar, str]:
    """The grammar and the text of a case."""
    properties, value = CASES[name]
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    grammar = grammar_of(json_schema=json.dumps(schema))
    assert grammar is not None
    return grammar, json.dumps(value)


def grammars_of(codec: TextCodec, vocab_size: int) -> tuple[Grammars, float]:
    """(grammars on a tokenizer, the ms that it took)."""
    started = time.thread_time()
    vocabulary = Vocabulary(codec.token_bytes, codec.special_tokens.values(), vocab_size)
    grammars = Grammars(lambda: vocabulary, [])
    grammars.compiled(Grammar("regex", "start: /x/"))
    return grammars, _ms_since(started)


def measure(grammars: Grammars, grammar: Grammar, ids: list[int], vocab_size: int, k: int) -> Cost:
    """Rounds of ``k`` drafted ids of a text, of which the first half is accepted."""
    started = time.thread_time()
    grammars.compiled(grammar)
    compile_ms = _ms_since(started)
    source, logits = np.zeros((k + 1, vocab_size), np.float32), np.empty((k + 1, vocab_size), np.float32)
    times: dict[bool, list[float]] = {False: [], True: []}
    for greedy, rounds_ms in times.items():
        for _ in range(REPEATS):
            constraint = grammars.constraint(grammar, (), 0, best_only=greedy)
            for start in range(0, len(ids) - k, k // 2 + 1):
                source[:] = 0
                source[range(k + 1), ids[start : start + k + 1]] = 1
                started = time.thread_time()
                drafted = constraint.extended(ids[:start], ids[start : start + k], k)
                logits[:] = source
                constraint.apply(logits[: len(drafted) + 1], ids[:start], (), drafted)
                rounds_ms.append(_ms_since(started))
    fresh = grammars.constraint(grammar, (), 0)
    num_forced = sum(fresh.forced((), ids[:i]) is not None for i in range(len(ids)))
    return Cost(compile_ms, times[False], times[True], num_forced, len(ids))


def _ms_since(started: float) -> float:
    return (time.thread_time() - started) * 1e3


def _cells(rounds_ms: list[float]) -> str:
    warm = rounds_ms[len(rounds_ms) // REPEATS :]
    return f"{median(warm):.2f} | {mean(warm):.2f} | {max(warm):.2f}"


@click.command(cls=Tool)
@click.argument("tokenizer", type=click.Path(path_type=Path))
@click.option("-k", default=8, show_default=True, help="Drafted ids a round.")
def main(tokenizer: Path, k: int) -> None:
    """Time the masks of rounds with the TOKENIZER (a tokenizer.json), for JSON schemas of several kinds."""
    loaded = Tokenizer.from_file(str(tokenizer))
    vocab_size = loaded.get_vocab_size()
    codec = TextCodec(loaded, vocab_size, None, {})
    grammars, tokenizer_ms = grammars_of(codec, vocab_size)
    click.echo(f"{vocab_size} ids, {k + 1} rows; tokenizer {tokenizer_ms:.0f} ms once; ms a round\n")
    times = "median | mean | largest"
    click.echo(f"| schema | sampled: {times} | greedy: {times} | grammar, once | forced |")
    click.echo("|---|---|---|---|---|---|---|---|---|")
    for name in CASES:
        grammar, text = case_of(name)
        cost = measure(grammars, grammar, codec.ids_of_text(text, add_special_tokens=False), vocab_size, k)
        forced = f"{cost.num_forced} of {cost.num_tokens}"
        click.echo(
            f"| {name} | {_cells(cost.sampled_ms)} | {_cells(cost.greedy_ms)} | {cost.compile_ms:.1f} | {forced} |"
        )


if __name__ == "__main__":
    run_process(lambda: main)
