"""``python -m specrt.tools.lab.grammar_cost``: what a grammar adds to a round of K + 1 rows, on one core.

Texts are walked as a round does it: the masks of K drafted ids and the bonus row, with the rollback of what was
rejected, then the same masks on rows of logits.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import click
import numpy as np
from tokenizers import Tokenizer

from specrt.runtime.sampling.grammar import Grammars, Vocabulary
from specrt.runtime.structured import Grammar, grammar_of
from specrt.runtime.text.codec import TextCodec
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TEXT = '{"name": "Ada Lovelace of London", "age": 36, "tags": ["mathematics", "analytical engine", "notes"]}'
REPEATS = 20


@dataclass(frozen=True)
class Cost:
    """Times in ms. ``rounds_ms`` are of one text after the other; the first of all warms the matcher."""

    num_ids: int
    tokenizer_ms: float
    compile_ms: float
    rounds_ms: list[float]
    num_forced: int
    num_tokens: int


def measure(codec: TextCodec, vocab_size: int, grammar: Grammar, text: str, k: int) -> Cost:
    """Rounds of ``k`` drafted ids of ``text``, of which the first half is accepted."""
    ids = codec.ids_of_text(text, add_special_tokens=False)
    started = time.thread_time()
    vocabulary = Vocabulary(codec.token_bytes, codec.special_tokens.values(), vocab_size)
    grammars = Grammars(lambda: vocabulary, [])
    grammars.compiled(Grammar("regex", "start: /x/"))
    tokenizer_ms, started = _ms_since(started), time.thread_time()
    grammars.compiled(grammar)
    compile_ms = _ms_since(started)
    source, logits = np.zeros((k + 1, vocab_size), np.float32), np.empty((k + 1, vocab_size), np.float32)
    rounds_ms = []
    for _ in range(REPEATS):
        constraint = grammars.constraint(grammar, (), 0)
        for start in range(0, len(ids) - k, k // 2 + 1):
            started = time.thread_time()
            drafted = constraint.extended(ids[:start], ids[start : start + k], k)
            logits[:] = source
            constraint.apply(logits[: len(drafted) + 1], ids[:start], (), drafted)
            rounds_ms.append(_ms_since(started))
    fresh = grammars.constraint(grammar, (), 0)
    num_forced = sum(fresh.forced((), ids[:i]) is not None for i in range(len(ids)))
    return Cost(vocab_size, tokenizer_ms, compile_ms, rounds_ms, num_forced, len(ids))


def _ms_since(started: float) -> float:
    return (time.thread_time() - started) * 1e3


@click.command(cls=Tool)
@click.argument("tokenizer", type=click.Path(path_type=Path))
@click.option("-k", default=8, show_default=True, help="Drafted ids a round.")
def main(tokenizer: Path, k: int) -> None:
    """Time the masks of rounds with the TOKENIZER (a tokenizer.json) and a JSON schema of three properties."""
    loaded = Tokenizer.from_file(str(tokenizer))
    vocab_size = loaded.get_vocab_size()
    grammar = grammar_of(json_schema=json.dumps(SCHEMA))
    assert grammar is not None
    cost = measure(TextCodec(loaded, vocab_size, None, {}), vocab_size, grammar, TEXT, k)
    warm = cost.rounds_ms[len(cost.rounds_ms) // REPEATS :]
    click.echo(f"{vocab_size} ids; tokenizer {cost.tokenizer_ms:.0f} ms once; grammar {cost.compile_ms:.1f} ms once")
    click.echo(
        f"a round of {k + 1} rows: median {median(warm):.2f} ms, mean {mean(warm):.2f} ms, largest {max(warm):.2f} ms, "
        f"of the first text {max(cost.rounds_ms[:3]):.2f} ms"
    )
    click.echo(f"{cost.num_forced} of {cost.num_tokens} positions of the text have one allowed id")


if __name__ == "__main__":
    run_process(lambda: main)
