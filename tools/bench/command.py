"""The command ``specrt bench``: choose methods and prompts, run, then write tables, JSON and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest
from specrt.engines.processor import available_cores
from specrt.engines.storage.files import write_text_file
from specrt.tools.bench.bench import run_bench
from specrt.tools.bench.genai_model import genai_model
from specrt.tools.bench.llama_worker import check_llama_cpp
from specrt.tools.bench.methods import Method, choose_methods, needed_bytes, processes
from specrt.tools.bench.records import Bench, Settings
from specrt.tools.bench.tables import print_bench
from specrt.tools.hashing import checked_manifest
from specrt.tools.machine import describe_machine, notes
from specrt.tools.prompting.prompts import PER_CATEGORY, Prompt, bench_prompts, prompts_from_file
from specrt.tools.terminal.progress import shown_progress, shown_steps

MINUTES, QUICK_MINUTES = 9.0, 1.7
TOKENS, QUICK_TOKENS = 64, 32
RUNS = 3


def run_command(
    bundle: Path,
    baseline: str,
    categories: str | None,
    prompts: Path | None,
    k: int | None,
    prompts_per_category: int | None,
    max_new_tokens: int | None,
    num_runs: int | None,
    temperature: float,
    threads: int | None,
    budget_minutes: float | None,
    quick: bool,
    one_at_a_time: bool,
    source: str | None,
    draft_source: str | None,
    gguf: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    resume: bool,
) -> None:
    """Run the bench, print it, write its files. Raises ``SpecrtError``."""
    _check_files(json_file, html_file, resume)
    manifest = checked_manifest(bundle)
    methods = methods_of(baseline, manifest)
    given = {"target": source, "draft": draft_source, "gguf": None if gguf is None else str(gguf)}
    sources = {role: name for role, name in given.items() if name is not None}
    if any(method.library == "llama.cpp" for method in methods):
        check_llama_cpp(manifest, sources)
    if any(method.library == "genai" for method in methods):  # before the clock of --budget-minutes runs
        with shown_progress() as progress:
            genai_model(bundle, manifest, sources, progress)
    chosen = chosen_prompts(prompts, categories, prompts_per_category or (1 if quick else None))
    minutes = budget_minutes if budget_minutes is not None else QUICK_MINUTES if quick else MINUTES
    if minutes < 0:
        raise UsageError(f"--budget-minutes {minutes:g}: expected minutes, or 0 for no limit")
    settings = Settings(
        manifest.num_speculative_tokens if k is None else k,
        available_cores() if threads is None else threads,
        max_new_tokens or (QUICK_TOKENS if quick else TOKENS),
        num_runs or (1 if quick else RUNS),
        one_at_a_time=one_at_a_time,
        temperature=temperature,
        budget_s=minutes * 60 or None,
        sources=sources,
        keep_tokens=max_new_tokens is not None,
    )
    machine = describe_machine(settings.threads)
    for line in notes(machine, [needed_bytes(manifest, group) for group in processes(methods)], one_at_a_time):
        click.echo(line, err=True)
    required = [method.name for method in methods if method.library == "specrt"]
    journal = None if json_file is None else json_file.with_name(json_file.name + ".partial")
    with shown_steps(len(methods) * (1 + len(chosen) * settings.repeats) + 2) as progress:
        bench = run_bench(bundle, methods, chosen, settings, machine, progress, journal, resume, required)
    print_bench(bench)
    _write(bench.for_files(), json_file, html_file)


def methods_of(baseline: str, manifest: Manifest) -> tuple[Method, ...]:
    """The baselines, plain decoding, which all are compared with, and the methods that can draft with this bundle."""
    names = [name.strip() for name in baseline.split(",")]
    drafting = ["auto", "ngram", *([] if manifest.draft.kind == "ngram" else ["model"])]
    ordered: Sequence[str] = [*names, *(["plain"] if "plain" not in names else []), *drafting]
    return choose_methods(",".join(ordered), manifest)


def chosen_prompts(file: Path | None, categories: str | None, per_category: int | None) -> tuple[Prompt, ...]:
    """Built-in prompts or those of ``file``, at most ``per_category`` of each category; all first ones come first."""
    if file is None:
        names = [name.strip() for name in categories.split(",")] if categories is not None else []
        return bench_prompts(PER_CATEGORY if per_category is None else per_category, names)
    if categories is not None:
        raise UsageError("--categories: got --prompts too, but categories select built-in prompts; leave one out")
    own = [p for p in prompts_from_file(file) if per_category is None or p.number <= per_category]
    return tuple(sorted(own, key=lambda prompt: prompt.number))


def _check_files(json_file: Path | None, html_file: Path | None, resume: bool) -> None:
    """Check the output files before minutes of measuring. Raises ``UsageError``."""
    if resume and json_file is None:
        raise UsageError("--resume: got no --json; give the same --json as for the interrupted bench")
    if html_file is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise UsageError("--html: its charts need matplotlib; install specrt[bench]") from error


def _write(bench: Bench, json_file: Path | None, html_file: Path | None) -> None:
    if json_file is not None:
        write_text_file(json_file, json.dumps(bench.as_dict(), indent=1) + "\n")
    if html_file is not None:
        from specrt.tools.report.report import write_report

        for path in write_report(bench, html_file):
            click.echo(str(path))
