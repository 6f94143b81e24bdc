"""``python -m specrt.tools.lab.identity``: is the text the target's own, for every draft and every K?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

import specrt
from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.storage.files import write_text_file
from specrt.tools.bench.methods import CONTENDERS, Lineup
from specrt.tools.bench.scores import Difference, first_difference
from specrt.tools.prompting.prompts import Prompt, choose_prompts, encode_prompts
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.outputs import OUTPUT_FILE
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import Advance, shown_steps

DRAFTS = ("ngram", "model")


@dataclass(frozen=True)
class Check:
    """One way to generate against the reference: ``draft`` none is plain decoding."""

    draft: str
    k: int
    num_equal: int
    num_prompts: int
    num_tokens: int
    forks: tuple[Difference, ...]

    @property
    def name(self) -> str:
        return "plain" if self.draft == "none" else f"{self.draft}, K = {self.k}"


@dataclass(frozen=True)
class Ways:
    """What to check: drafts by K, on a number of threads, up to a number of tokens."""

    drafts: tuple[str, ...]
    ks: tuple[int, ...]
    threads: int
    max_new_tokens: int

    @property
    def pairs(self) -> list[tuple[str, int]]:
        """(draft, K); plain decoding first."""
        return [("none", 0), *((draft, k) for draft in self.drafts for k in self.ks)]


def eager_ids(bundle: Path, ids: Sequence[Sequence[int]], ways: Ways, advance: Advance) -> list[tuple[int, ...]]:
    """What transformers' ``generate`` makes of each prompt in fp32, from a process that is gone afterwards."""
    advance("eager: loading")
    contender, answers = CONTENDERS["eager"], []
    with Lineup(bundle, [[contender]], ways.threads) as lineup:
        for index, prompt_ids in enumerate(ids):
            advance(f"eager: prompt {index + 1} of {len(ids)}")
            answer = lineup.ask(contender, prompt_ids, 0, max_new_tokens=ways.max_new_tokens, ignore_eos=False)
            answers.append(answer.token_ids)
    return answers


def check_identity(
    bundle: Path,
    prompts: Sequence[Prompt],
    ways: Ways,
    eager: bool,
    advance: Advance = lambda step: None,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Check]:
    """A check for each way. The reference is transformers in fp32, or plain decoding where ``eager`` is False.

    ``tell`` gets a line as each way is done: a check of a large model takes long, and may be interrupted.
    """
    manifest = manifest_from_bundle(bundle)
    ids = encode_prompts(prompts, bundle, manifest, ways.max_new_tokens)
    expected: list[tuple[int, ...]] = eager_ids(bundle, ids, ways, advance) if eager else []
    with specrt.load(bundle, threads=ways.threads) as runtime:

        def answers(draft: str, k: int) -> Iterator[tuple[int, ...]]:
            for index, prompt_ids in enumerate(ids):
                advance(f"{draft}, K = {k}: prompt {index + 1} of {len(ids)}")
                result = runtime.generate(
                    prompt_ids, max_new_tokens=ways.max_new_tokens, num_speculative_tokens=k, draft=draft
                )
                yield tuple(result.token_ids)

        checks = []
        for draft, k in ways.pairs:
            got = list(answers(draft, k))
            expected = expected or got
            checks.append(_check(draft, k, prompts, expected, got))
            tell(f"{checks[-1].name}: {checks[-1].num_equal} of {len(prompts)} prompts the same")
        return checks


def _check(
    draft: str, k: int, prompts: Sequence[Prompt], expected: Sequence[tuple[int, ...]], got: Sequence[tuple[int, ...]]
) -> Check:
    rows = zip(prompts, expected, got, strict=True)
    found = [first_difference(prompt.category, ours, theirs) for prompt, ours, theirs in rows]
    forks = tuple(difference for difference in found if difference is not None)
    return Check(draft, k, found.count(None), len(prompts), sum(map(len, got)), forks)


def print_checks(checks: Sequence[Check], reference: str) -> None:
    """A line for each way, then one for each fork."""
    console = Console()
    table = Table(title=f"greedy ids against those of {reference}", title_justify="left")
    table.add_column("specrt")
    for heading in ("same prompts", "tokens", "forks"):
        table.add_column(heading, justify="right")
    for check in checks:
        same = f"{check.num_equal} of {check.num_prompts}"
        table.add_row(check.name, same, str(check.num_tokens), str(len(check.forks)))
    console.print(table)
    for check in checks:
        for fork in check.forks:
            console.print(f"{check.name} forks in {fork}", highlight=False)


def _ways(manifest: Manifest, ks: str | None, drafts: str | None, threads: int | None, max_new_tokens: int) -> Ways:
    from specrt.engines.processor import available_cores

    built = manifest.num_speculative_tokens
    offered = DRAFTS if manifest.draft.kind != "ngram" else DRAFTS[:1]
    chosen = tuple(drafts.split(",")) if drafts else offered
    if unknown := [draft for draft in chosen if draft not in offered]:
        raise UsageError(f"drafts: got {unknown[0]!r}, this bundle offers {', '.join(offered)}; ask for these")
    texts = ks.split(",") if ks else [str(k) for k in range(1, built + 1)]
    if unknown := [text for text in texts if not text.isdecimal() or not 1 <= int(text) <= built]:
        raise UsageError(f"k: got {unknown[0]!r}, this bundle was exported for 1 to {built}; ask for these")
    return Ways(chosen, tuple(map(int, texts)), threads or available_cores(), max_new_tokens)


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--max-new-tokens", type=click.IntRange(1), default=96, show_default=True)
@click.option("--k", "ks", help="Such as 1,2,8. [default: every K of the bundle]")
@click.option("--drafts", help="Some of ngram,model. [default: what the bundle has]")
@click.option("--prompts", "wanted", help="A number, 'code', or categories. [default: all]")
@click.option("--reference", type=click.Choice(["eager", "none"]), default="eager", show_default=True)
@click.option("--threads", type=click.IntRange(1), help="[default: the cores this process may use]")
@click.option("--json", "json_file", type=OUTPUT_FILE, help="Write everything to this file.")
def main(
    bundle: Path,
    max_new_tokens: int,
    ks: str | None,
    drafts: str | None,
    wanted: str | None,
    reference: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Compare BUNDLE's ids with those of transformers in fp32, for plain decoding and for every draft and K.

    '--reference none' compares with plain decoding alone. Exits with 1 when any prompt forks.
    """
    ways, prompts = _ways(manifest_from_bundle(bundle), ks, drafts, threads, max_new_tokens), choose_prompts(wanted)
    eager = reference == "eager"
    num_steps = len(prompts) * (len(ways.pairs) + eager) + eager
    with shown_steps(num_steps) as advance:
        checks = check_identity(bundle, prompts, ways, eager, advance, lambda line: click.echo(line, err=True))
    print_checks(checks, "transformers in fp32" if eager else "plain decoding")
    if json_file is not None:
        rows = [asdict(check) for check in checks]
        write_text_file(json_file, json.dumps({"reference": reference, "checks": rows}, indent=1) + "\n")
    num_forks = sum(len(check.forks) for check in checks)
    if num_forks:
        num_texts = sum(check.num_prompts for check in checks)
        raise SpecrtError(f"{num_forks} of {num_texts} texts are not the target's own; see the forks above")


if __name__ == "__main__":
    run_process(lambda: main)
