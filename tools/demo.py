"""``python -m specrt.tools.demo``: fetch, export, generate and compare, each step below the command that does it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

import specrt
from specrt.engines.errors import BundleError, ResourceError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.storage.files import write_text_file
from specrt.engines.storage.integrity import check_files
from specrt.tools.bench.bench import run_bench
from specrt.tools.bench.methods import choose_methods, needed_bytes, processes
from specrt.tools.bench.records import Bench, Settings
from specrt.tools.bench.tables import print_bench
from specrt.tools.lab.models import fetch
from specrt.tools.machine import OMP_WAIT_POLICY, describe_machine, notes
from specrt.tools.prompting.prompts import choose_prompts
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import shown_steps

# One that copies most of its prompt, one of code, and one where n-grams have nothing to find.
CATEGORIES = "rewriting,code-completion,creative"
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """What a demo does. ``disk_bytes`` and ``memory_bytes`` are those of its largest step, ``minutes`` on two cores."""

    target: str
    draft: str
    k: int
    baseline: str
    repeats: int
    disk_bytes: int
    memory_bytes: int
    minutes: int

    @property
    def has_draft_model(self) -> bool:
        return self.draft != "ngram"

    @property
    def names(self) -> str:
        """The methods."""
        return f"{self.baseline},{'model' if self.has_draft_model else 'ngram'}"

    @property
    def bundle(self) -> Path:
        return Path("bundles") / "-".join([self.target, *([self.draft] if self.has_draft_model else [])])


SMALL = Plan("smollm2-135m", "ngram", 5, "eager,plain", 3, 1_000_000_000, 3_000_000_000, 4)
PAIR = Plan("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", 4, "eager,assisted,plain", 1, 10**10, 11_500_000_000, 15)
console = Console(highlight=False, soft_wrap=True)


def run(plan: Plan) -> None:
    """The whole demo. Raises ``SpecrtError``; what was fetched and exported stays for the next time."""
    _tell_needs(plan)
    paths = [_fetch(name) for name in (plan.target, *([plan.draft] if plan.has_draft_model else []))]
    manifest = _existing(plan) or _export(plan, paths)
    _generate(plan)
    _tell_result(_bench(plan, manifest))
    _tell_commands(plan, paths)


def _tell_needs(plan: Plan) -> None:
    """Say what it takes, and refuse when the disk cannot hold it."""
    disk = f"{plan.disk_bytes / 1e9:.1f} GB of disk"
    console.print(
        f"needs {disk}, {plan.memory_bytes / 1e9:.1f} GB of memory and about {plan.minutes} minutes on 2 cores"
    )
    free = shutil.disk_usage(".").free
    if free < plan.disk_bytes and not plan.bundle.exists():
        raise ResourceError(f"demo: needs {disk} and {free / 1e9:.1f} GB are free in this folder; make room first")


def _announce(*command: str) -> None:
    console.print(f"\n[bold]$ {escape(shlex.join(command))}[/bold]")


def _fetch(name: str) -> Path:
    _announce("specrt", "fetch", name)
    path = fetch(name)
    console.print(str(path))
    return path


def _export_command(plan: Plan, paths: Sequence[Path]) -> list[str]:
    draft = str(paths[1]) if plan.has_draft_model else plan.draft
    return ["specrt", "export", str(paths[0]), "--output", str(plan.bundle), "--draft", draft, "-k", str(plan.k)]


def _existing(plan: Plan) -> Manifest | None:
    """The manifest of a bundle that is there already and fits, or None."""
    if not plan.bundle.exists():
        return None
    try:
        manifest = manifest_from_bundle(plan.bundle)
        check_files(plan.bundle, manifest)
        if manifest.draft.kind != ("model" if plan.has_draft_model else plan.draft):
            raise BundleError(f"{plan.bundle}: a bundle with another draft ({manifest.draft.kind}) is there")
        if manifest.num_speculative_tokens < plan.k:
            raise BundleError(f"{plan.bundle}: a bundle for K up to {manifest.num_speculative_tokens} is there")
    except BundleError as error:
        console.print(f"\n{error}; exporting again")
        return None
    console.print(f"\n{plan.bundle}: a valid bundle is there already, so the export is skipped")
    return manifest


def _export(plan: Plan, paths: Sequence[Path]) -> Manifest:
    from specrt.tools.terminal.progress import quiet_libraries, shown_progress

    force = plan.bundle.exists()
    _announce(*_export_command(plan, paths), *(["--force"] if force else []))
    quiet_libraries()
    from specrt.exporter.export import export
    from specrt.exporter.options import ExportOptions

    draft = str(paths[1]) if plan.has_draft_model else plan.draft
    with shown_progress() as progress:
        options = ExportOptions(str(paths[0]), plan.bundle, draft, num_speculative_tokens=plan.k, force=force)
        return export(options, progress)


def _generate(plan: Plan) -> None:
    """Each prompt as a message to the model, with and without drafts; the prompts stay next to the bundle as files."""
    with specrt.load(plan.bundle) as runtime:
        for prompt in choose_prompts(CATEGORIES):
            file = plan.bundle.parent / f"prompt-{prompt.category}.json"
            messages = [{"role": "user", "content": prompt.text}]
            write_text_file(file, json.dumps(messages, indent=1) + "\n")
            texts = []
            for k in (plan.k, 0):
                options = ["--messages", str(file), "--max-new-tokens", str(MAX_NEW_TOKENS), "-k", str(k)]
                _announce("specrt", "generate", str(plan.bundle), *options)
                result = runtime.generate(messages, max_new_tokens=MAX_NEW_TOKENS, num_speculative_tokens=k)
                texts.append(result.text)
                console.print("the same text" if k == 0 and texts[0] == texts[1] else escape(result.text), style="cyan")
                rounds, speed = result.stats.mean_acceptance_length or 1, result.stats.tokens_per_s or 0
                console.print(f"{speed:.1f} tokens/s after the first token, {rounds:.2f} tokens per round")


def _bench(plan: Plan, manifest: Manifest) -> Bench:
    options = f"--baseline {plan.baseline} -k {plan.k} --categories {CATEGORIES}".split()
    _announce("specrt", "bench", str(plan.bundle), *options)
    console.print(f"(here: one prompt of each category, {plan.repeats} times)")
    import psutil

    from specrt.engines.processor import available_cores

    methods = choose_methods(plan.names, manifest)
    needed = [needed_bytes(manifest, group) for group in processes(methods)]
    one_at_a_time = sum(needed) > psutil.virtual_memory().available
    machine = describe_machine(available_cores())
    if machine.is_busy:  # torch would take ten times as long otherwise
        os.environ.setdefault(OMP_WAIT_POLICY, "PASSIVE")
        machine = replace(machine, omp_wait_policy=os.environ[OMP_WAIT_POLICY])
    for line in notes(machine, needed, one_at_a_time):
        console.print(line)
    settings = Settings(plan.k, machine.threads, MAX_NEW_TOKENS, plan.repeats, one_at_a_time=one_at_a_time)
    prompts = choose_prompts(CATEGORIES)
    with shown_steps(len(methods) * (1 + len(prompts) * plan.repeats) + 1) as advance:
        bench = run_bench(plan.bundle, methods, prompts, settings, machine, advance)
    print_bench(bench)
    return bench


def _tell_result(bench: Bench) -> None:
    """The comparison in one sentence, whichever way it went."""
    last = bench.scores[-1]
    doubt = "; but other programs ran meanwhile, so run it again on a quiet machine" if bench.is_busy else ""
    console.print(
        f"\n{last.method}: {last.ratio_to['eager']:.2f} times as many tokens a second as transformers' generate, "
        f"{last.ratio_to['plain']:.2f} times as many as without drafts; "
        f"the ids of transformers on {last.equal_prompts} of {last.num_prompts} prompts{doubt}"
    )


def _tell_commands(plan: Plan, paths: Sequence[Path]) -> None:
    console.print("\nTo do it yourself:")
    for command in (
        ["specrt", "fetch", plan.target, *([plan.draft] if plan.has_draft_model else [])],
        _export_command(plan, paths),
        ["specrt", "generate", str(plan.bundle), "--raw", "--prompt", "def fibonacci(n):", "--stats"],
    ):
        console.print(f"  {escape(shlex.join(command))}")


@click.command(cls=Tool)
@click.option("--pair", is_flag=True, help="Qwen2.5-Coder 1.5B with the 0.5B as its draft, instead of SmolLM2-135M.")
def main(pair: bool) -> None:
    """Fetch a small model, export it, generate with it, and compare with transformers."""
    run(PAIR if pair else SMALL)


if __name__ == "__main__":
    run_process(lambda: main)
