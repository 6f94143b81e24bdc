"""``python -m specrt.tools.compare``: contenders side by side on the same prompts, ids and threads of one machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from specrt.engines.errors import INTERRUPTED_EXIT_CODE, SpecrtError, UsageError
from specrt.engines.integrity import check_files
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.tools.contenders import CONTENDERS, Answer, Contender, Lineup, choose_contenders, needed_bytes, processes
from specrt.tools.machine import Machine, describe_machine, notes
from specrt.tools.prompts import Prompt, choose_prompts, encode_prompts
from specrt.tools.scores import Score, print_scores, score

WARM_UP_TOKENS = 16
DEFAULT_CONTENDERS = "eager,plain,ngram"
Advance = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to compare. ``one_at_a_time`` loads one process after the other, for machines short of memory."""

    k: int
    threads: int
    max_new_tokens: int = 64
    repeats: int = 3
    ignore_eos: bool = False
    one_at_a_time: bool = False

    def __post_init__(self) -> None:
        for name in ("k", "threads", "max_new_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', '-')}: got {getattr(self, name)}, expected 1 or more")


@dataclass(frozen=True)
class Comparison:
    """Scores of the contenders, and what is needed to read them. ``prompts`` maps a category to its prompt's tokens."""

    machine: Machine
    bundle: str
    settings: Settings
    prompts: dict[str, int]
    scores: tuple[Score, ...]

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` writes."""
        return asdict(self)


def compare(
    bundle: Path,
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    settings: Settings,
    machine: Machine,
    advance: Advance = lambda step: None,
) -> Comparison:
    """Run every contender on every prompt, interleaved prompt by prompt in an order that rotates.

    Ids are compared with those of the first contender. ``advance`` is told what is about to start. Raises
    ``SpecrtError``; a worker that fails ends the comparison.
    """
    manifest = manifest_from_bundle(bundle)
    if settings.k > manifest.num_speculative_tokens:
        raise UsageError(f"k: got {settings.k}, this bundle was exported for 1 to {manifest.num_speculative_tokens}")
    ids = encode_prompts(prompts, bundle, manifest, settings.max_new_tokens)
    answers: dict[str, list[list[Answer]]] = {c.name: [[] for _ in prompts] for c in contenders}
    groups = processes(contenders) if settings.one_at_a_time else [list(contenders)]
    for group in groups:
        advance("loading " + ", ".join(contender.name for contender in group))
        with Lineup(bundle, group, settings.threads) as lineup:
            _run(lineup, group, ids, settings, answers, advance)
    categories = [prompt.category for prompt in prompts]
    return Comparison(
        machine,
        _described(manifest),
        settings,
        dict(zip(categories, map(len, ids), strict=True)),
        score(answers, categories),
    )


def _run(
    lineup: Lineup,
    contenders: Sequence[Contender],
    ids: Sequence[Sequence[int]],
    settings: Settings,
    answers: Mapping[str, list[list[Answer]]],
    advance: Advance,
) -> None:
    for contender in contenders:
        advance(f"{contender.name}: warm-up")
        lineup.ask(contender, ids[0], settings.k, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    for repeat in range(settings.repeats):
        for index, prompt_ids in enumerate(ids):
            first = (repeat + index) % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                advance(f"{contender.name}: prompt {index + 1} of {len(ids)}, repeat {repeat + 1}")
                limits = {"max_new_tokens": settings.max_new_tokens, "ignore_eos": settings.ignore_eos}
                answers[contender.name][index].append(lineup.ask(contender, prompt_ids, settings.k, **limits))


def _described(manifest: Manifest) -> str:
    target, draft = manifest.target, manifest.draft.model
    draft_name = Path(draft.source).name if draft is not None else manifest.draft.kind
    return f"{Path(target.source).name} ({target.spec.dtype}), draft {draft_name}"


@contextmanager
def shown_steps(total: int) -> Iterator[Advance]:
    """One bar on standard error that counts to ``total``; only a terminal shows it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=total)
        yield lambda step: bars.update(task, advance=1, description=step)


def print_comparison(comparison: Comparison) -> None:
    """The machine, the pair and the scores on standard output."""
    console, settings = Console(highlight=False, soft_wrap=True), comparison.settings
    console.print(str(comparison.machine))
    console.print(
        f"{comparison.bundle}, K = {settings.k}; greedy, at most {settings.max_new_tokens} tokens for each of "
        f"{len(comparison.prompts)} prompts, medians of {settings.repeats}"
    )
    print_scores(console, comparison.scores)


@contextmanager
def one_line() -> Iterator[None]:
    """Errors as one line and an exit code (docs/exit-codes.md), for commands outside the ``specrt`` group."""
    try:
        yield
    except (SpecrtError, OSError) as error:
        click.echo(f"specrt: error: {error}", err=True)
        raise SystemExit(getattr(error, "exit_code", 1)) from error
    except KeyboardInterrupt:
        click.echo("specrt: interrupted", err=True)
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--contenders", "names", default=DEFAULT_CONTENDERS, show_default=True, help=f"Of {', '.join(CONTENDERS)}."
)
@click.option("--k", type=int, help="K of those that draft. [default: the bundle's]")
@click.option("--prompts", "wanted", help="A number, 'code', or categories. [default: all]")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", type=int, help="[default: the cores this process may use]")
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the end-of-sequence tokens.")
@click.option("--one-at-a-time", is_flag=True, help="Load one process after the other; needs less memory.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write everything to this file.")
@one_line()
def main(
    bundle: Path,
    names: str,
    wanted: str | None,
    k: int | None,
    threads: int | None,
    json_file: Path | None,
    **rest: Any,
) -> None:
    """Compare ways to generate greedily from BUNDLE's models: the same prompt ids, limits and threads for all."""
    from specrt.engines.cpu import available_cores

    manifest = manifest_from_bundle(bundle)
    check_files(bundle, manifest)
    contenders, prompts = choose_contenders(names, manifest), choose_prompts(wanted)
    built = manifest.num_speculative_tokens
    settings = Settings(built if k is None else k, available_cores() if threads is None else threads, **rest)
    machine = describe_machine(settings.threads)
    process_bytes = [needed_bytes(manifest, group) for group in processes(contenders)]
    for line in notes(machine, process_bytes, settings.one_at_a_time):
        click.echo(line, err=True)
    num_steps = len(contenders) * (1 + len(prompts) * settings.repeats) + 1
    with shown_steps(num_steps) as advance:
        comparison = compare(bundle, contenders, prompts, settings, machine, advance)
    print_comparison(comparison)
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.as_dict(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
