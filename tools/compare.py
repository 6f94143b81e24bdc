"""``python -m specrt.tools.compare``: contenders side by side on the same prompts, ids and threads of one machine."""

from __future__ import annotations

import importlib.metadata
import json
import platform
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
from specrt.tools.prompts import Prompt, choose_prompts, encode_prompts
from specrt.tools.scores import Score, print_scores, score

WARM_UP_TOKENS = 16
DEFAULT_CONTENDERS = "eager,plain,ngram"
_VERSIONED = ("specrt", "torch", "transformers", "onnxruntime", "numpy")
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

    machine: dict[str, Any]
    bundle: dict[str, Any]
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
    advance: Advance = lambda step: None,
) -> Comparison:
    """Run every contender on every prompt, interleaved prompt by prompt in an order that rotates.

    Ids are compared with those of the first contender. ``advance`` is told what is about to start. Raises
    ``SpecrtError``; a worker that fails ends the comparison.
    """
    manifest = manifest_from_bundle(bundle)
    ids = encode_prompts(prompts, bundle, manifest)
    check_limits(manifest, settings.k, max(map(len, ids)) + settings.max_new_tokens)
    answers: dict[str, list[list[Answer]]] = {c.name: [[] for _ in prompts] for c in contenders}
    groups = processes(contenders) if settings.one_at_a_time else [list(contenders)]
    for group in groups:
        advance("loading " + ", ".join(contender.name for contender in group))
        with Lineup(bundle, group, settings.threads) as lineup:
            _run(lineup, group, ids, settings, answers, advance)
    categories = [prompt.category for prompt in prompts]
    return Comparison(
        machine(settings.threads),
        _described(bundle, manifest),
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


def check_limits(manifest: Manifest, k: int, num_tokens: int) -> None:
    """Raise ``UsageError`` unless the bundle has room for ``k`` and for a prompt and its answer of ``num_tokens``."""
    built, context = manifest.num_speculative_tokens, manifest.target.spec.max_seq_len
    if not 1 <= k <= built:
        raise UsageError(f"k: got {k}, this bundle was exported for 1 to {built}; ask for less, or export again")
    if num_tokens > context:
        raise UsageError(f"prompt and answer: {num_tokens} tokens, the bundle's context is {context}; ask for less")


def machine(threads: int) -> dict[str, Any]:
    """The CPU by its own name, its cores that this process may use, and the versions that matter."""
    from specrt.engines.ort import available_cores

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {name: importlib.metadata.version(name) for name in _VERSIONED}
    cpu = names[0] if names else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": available_cores(), "threads": threads, "versions": versions}


def memory_note(manifest: Manifest, contenders: Sequence[Contender], one_at_a_time: bool) -> str:
    """What loading takes, in a line."""
    import psutil

    groups = [needed_bytes(manifest, group) for group in processes(contenders)]
    needed = max(groups) if one_at_a_time else sum(groups)
    available = psutil.virtual_memory().available
    advice = f"; pass --one-at-a-time to need {max(groups) / 1e9:.1f} GB" if needed > available > max(groups) else ""
    return f"needs about {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available{advice}"


def _described(bundle: Path, manifest: Manifest) -> dict[str, Any]:
    draft = manifest.draft.model
    return {
        "name": bundle.resolve().name,
        "target": Path(manifest.target.source).name,
        "draft": Path(draft.source).name if draft is not None else manifest.draft.kind,
        "dtype": manifest.target.spec.dtype,
    }


@contextmanager
def shown_steps(total: int) -> Iterator[Advance]:
    """One bar on standard error that counts to ``total``; only a terminal shows it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=total)
        yield lambda step: bars.update(task, advance=1, description=step)


def print_comparison(comparison: Comparison) -> None:
    """The machine, the pair and the scores on standard output."""
    host, pair, settings = comparison.machine, comparison.bundle, comparison.settings
    console = Console()
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    console.print(f"{host['cpu']}, {host['threads']} threads of {host['cores']} cores; {versions}", highlight=False)
    console.print(
        f"{pair['target']} ({pair['dtype']}), draft {pair['draft']}, K = {settings.k}; {len(comparison.prompts)} prompts, "
        f"at most {settings.max_new_tokens} tokens each, greedy, medians of {settings.repeats}",
        highlight=False,
    )
    print_scores(console, comparison.scores)


@contextmanager
def one_line() -> Iterator[None]:
    """Errors of specrt as one line and their exit code, for commands outside the ``specrt`` group."""
    try:
        yield
    except SpecrtError as error:
        click.echo(f"specrt: error: {error}", err=True)
        raise SystemExit(error.exit_code) from error
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
    k: int | None,
    wanted: str | None,
    threads: int | None,
    json_file: Path | None,
    **rest: Any,
) -> None:
    """Compare ways to generate from BUNDLE's models greedily: the same prompt ids, limits and threads for all."""
    from specrt.engines.ort import available_cores

    manifest = manifest_from_bundle(bundle)
    check_files(bundle, manifest)
    contenders, prompts = choose_contenders(names, manifest), choose_prompts(wanted)
    settings = Settings(k or manifest.num_speculative_tokens, threads or available_cores(), **rest)
    Console(stderr=True).print(memory_note(manifest, contenders, settings.one_at_a_time), highlight=False)
    num_steps = len(contenders) * (1 + len(prompts) * settings.repeats) + 1
    with shown_steps(num_steps) as advance:
        comparison = compare(bundle, contenders, prompts, settings, advance)
    print_comparison(comparison)
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.as_dict(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
