"""``python -m specrt.tools.lab.hops BUNDLE``: how often the calls of one greedy round go from one file to another.

A hop is a call of a Python function of specrt from another file of specrt. A reader has to follow each of them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click

import specrt
from specrt.runtime.options import options_of
from specrt.runtime.settings import settings_of
from specrt.tools.rounds import run_rounds
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process

PROMPT = "def fibonacci(n):\n    "

# (calling module, called module, called function)
Hop = tuple[str, str, str]


def hops_between(run: Callable[[Callable[[], None]], object]) -> list[Counter[Hop]]:
    """The hops between consecutive calls of ``cut``, which ``run`` gets as its argument."""
    found: list[Counter[Hop]] = [Counter()]

    def note(frame: FrameType, event: str, _: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None:
            return
        names = [str(f.f_globals.get("__name__", "")) for f in (caller, frame)]
        if names[0] != names[1] and all(name.startswith("specrt.") and name != __name__ for name in names):
            found[-1][names[0], names[1], frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        run(lambda: found.append(Counter()))
    finally:
        sys.setprofile(None)
    return found[1:-1]


def greedy_round(bundle: Path, k: int) -> Counter[Hop]:
    """The hops of the third round of greedy decoding with ``k`` drafted tokens of the bundle's own draft."""
    with specrt.load(bundle) as runtime:
        slot = runtime.open_slot("none" if runtime.manifest.draft.kind == "ngram" else "model")
        wanted = options_of({"max_new_tokens": 5 * (k + 1), "ignore_eos": True, "num_speculative_tokens": k})
        settings = settings_of(wanted, runtime.manifest)
        prompt = runtime.codec.encode(PROMPT)
        rounds = hops_between(lambda cut: run_rounds(runtime, slot, prompt, settings, lambda *_: cut()))
        slot.close()
    return rounds[2]


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--k", type=click.IntRange(0), default=3, show_default=True, help="Drafted tokens in the round.")
def main(bundle: Path, k: int) -> None:
    """The hops of one greedy round of BUNDLE."""
    hops = greedy_round(bundle, k)
    for (caller, callee, function), count in hops.most_common():
        click.echo(f"{count:4} {caller.removeprefix('specrt.')} -> {callee.removeprefix('specrt.')}.{function}")
    click.echo(f"{hops.total():4} in all, K = {k}")


if __name__ == "__main__":
    run_process(lambda: main)
