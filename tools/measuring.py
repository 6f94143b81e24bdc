"""The commands ``specrt plan``, ``align`` and ``bench``: their options. What they need is imported when they run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import UsageError
from specrt.tools.prompting.options import MAX_THREADS
from specrt.tools.terminal.outputs import OUTPUT_FILE as OUTPUT

FILE = click.Path(path_type=Path)
BASELINES = "Of eager, eager-bf16, eager-compiled, assisted, assisted-bf16, lookup, llama.cpp, plain."


@click.command()
@click.argument("target")
@click.option("--draft", default="ngram", show_default=True, metavar="DRAFT|ngram", help="The draft's config.")
@click.option("--device", help="One of the table ('--device list' shows it), or a file of specrt.tools.plan.calibrate.")
@click.option("--bandwidth", type=float, help="GB/s, where no --device is given.")
@click.option("--tflops", type=float, help="Dense peak in the dtype's arithmetic, where no --device is given.")
@click.option("--memory", type=float, help="GB, with --bandwidth and --tflops.")
@click.option("--dtype", help="fp32, fp16 or bf16.  [default: fp16; fp32 for a measured CPU]")
@click.option("--quantize", default="none", show_default=True, help="Weights of the target: none, int8, w8a8 or int4.")
@click.option("--draft-quantize", default="none", show_default=True, help="Weights of the draft.")
@click.option("--max-seq-len", type=int, help="Context in tokens.  [default: 2048, or the model's where shorter]")
@click.option("--past", type=int, help="Cached tokens to assume.  [default: half of the context]")
@click.option("--acceptance", type=float, default=0.8, show_default=True, help="Chance of each drafted token.")
@click.option("--from", "measured", type=FILE, help="Acceptance by position: the --json of align or bench.")
@click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with a hub model.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(target: str, draft: str, as_json: bool, trust_remote_code: bool, **options: Any) -> None:
    """Predict what TARGET with a draft takes and gives on a device, from configs alone.

    TARGET and DRAFT are a hub id, a folder with a config.json, that file itself, or a .gguf file; no weight is read.
    """
    from specrt.tools.terminal.progress import quiet_libraries

    quiet_libraries()
    from specrt.tools.plan.plan import MAX_K, acceptance_from_file, make_plan, print_plan
    from specrt.tools.plan.sizes import DEFAULT_MAX_SEQ_LEN, Shape, cost_of

    device = _device(options)
    if device is None:
        return
    dtype = options["dtype"] or ("fp16" if device.overlaps else "fp32")
    measured, given = options["measured"], (options["acceptance"],)
    acceptance = acceptance_from_file(measured, draft != "ngram") if measured else given
    length = DEFAULT_MAX_SEQ_LEN if options["max_seq_len"] is None else options["max_seq_len"]
    costs = [cost_of(target, Shape(dtype, options["quantize"], length, MAX_K), None, trust_remote_code)]
    if draft != "ngram":
        costs.append(cost_of(draft, Shape(dtype, options["draft_quantize"], length, MAX_K), None, trust_remote_code))
    if options["max_seq_len"] is not None and costs[0].max_seq_len < length:
        raise UsageError(
            f"--max-seq-len {length}: {costs[0].name} has a context of {costs[0].max_seq_len}; ask for less"
        )
    made = make_plan(device, costs[0], costs[1] if costs[1:] else None, options["past"], acceptance)
    if as_json:
        click.echo(json.dumps(made.as_dict()))
    else:
        print_plan(made)


def _device(options: dict[str, Any]) -> Any:
    """The device asked for, or None when only the table was wanted."""
    from specrt.tools.plan.roofline import device_table, find_device, vendor_device

    name, figures = options["device"], (options["bandwidth"], options["tflops"])
    if name == "list":
        for key, row in device_table().items():
            memory = (row.memory_bytes or 0) / 1e9
            click.echo(f"{key:18} {row.name:36} {memory:5.0f} GB   {row.source}; {row.checked}")
        return None
    if name is not None:
        if figures != (None, None) or options["memory"] is not None:
            raise UsageError("--device: got --bandwidth, --tflops or --memory too; give one or the other")
        return find_device(name)
    if None in figures or min(figures) <= 0:
        raise UsageError("plan: got no --device, expected one, or both --bandwidth and --tflops (more than 0)")
    return vendor_device("a device of your own", options["memory"], *figures, "--bandwidth and --tflops")


@click.command()
@click.argument("bundle", type=FILE)
@click.option("--prompts", "file", type=FILE, help="Prompts of your own: one a line, or JSON lines.  [default: ours]")
@click.option("--num-prompts", default=24, show_default=True, help="The first so many; 0 takes all.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=48, show_default=True, help="Of each prompt.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]")
@click.option("--json", "json_file", type=OUTPUT, help="Write everything to this file; 'specrt plan --from' reads it.")
def align(
    bundle: Path, file: Path | None, num_prompts: int, max_new_tokens: int, json_file: Path | None, **options: Any
) -> None:
    """How well BUNDLE's draft suits its target on your prompts, and whether to use it.

    The target writes its own text; both models then read it, so that one run tells the acceptance at every K.
    """
    from specrt.tools.align.align import align as run
    from specrt.tools.align.align import print_alignment
    from specrt.tools.prompting.prompts import bench_prompts, prompts_from_file
    from specrt.tools.terminal.progress import shown_steps

    prompts = prompts_from_file(file) if file is not None else bench_prompts()
    prompts = prompts[: num_prompts or None]
    with shown_steps(len(prompts) + 1) as advance:
        found = run(bundle, prompts, max_new_tokens, advance=advance, **options)
    print_alignment(found, json_file)


@click.command()
@click.argument("bundle", type=FILE)
@click.option("--baseline", default="eager,plain", show_default=True, help=BASELINES)
@click.option("--categories", help="Some of our twelve kinds of prompts, by comma.  [default: all]")
@click.option("--prompts", "file", type=FILE, help="Prompts of your own: one a line, or JSON lines.  [default: ours]")
@click.option("--prompts-per-category", type=click.IntRange(1), help="The most of a kind.  [default: all; --quick: 1]")
@click.option("--num-speculative-tokens", "-k", "k", type=int, help="K of those that draft.  [default: the bundle's]")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(2),
    help="Of each answer.  [default: 64, --quick 32; fewer for want of time]",
)
@click.option("--num-runs", type=click.IntRange(1), help="The most answers to each prompt.  [default: 3; --quick: 1]")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--threads", type=click.IntRange(1, MAX_THREADS), help="[default: the cores this process may use]")
@click.option(
    "--budget-minutes",
    type=float,
    help="Stop after so long, with what is whole, and say what is missing; 0 has no limit.  [default: 9; --quick: 1.7]",
)
@click.option(
    "--quick", is_flag=True, help="One short prompt of each category, in under two minutes for a small model."
)
@click.option("--one-at-a-time", is_flag=True, help="Load one process after the other; needs less memory.")
@click.option("--source", help="The torch model of the target.  [default: where the bundle came from]")
@click.option("--draft-source", help="The torch model of the draft.  [default: where the bundle came from]")
@click.option("--gguf", type=FILE, help="What llama.cpp reads.  [default: the .gguf file that the bundle came from]")
@click.option("--json", "json_file", type=OUTPUT, help="Write everything to this file; needed for --resume.")
@click.option(
    "--html", "html_file", type=OUTPUT, help="Write a report to this file, and its charts as PNGs next to it."
)
@click.option("--resume", is_flag=True, help="Go on with the interrupted bench of the same --json.")
def bench(bundle: Path, **options: Any) -> None:
    """Measure BUNDLE's speculation against PyTorch and against plain decoding, and say where it loses.

    All methods get the same prompt ids, threads and limits, take turns prompt by prompt, and their ids are compared.
    """
    from specrt.tools.bench.command import run_command

    run_command(bundle, **options)


COMMANDS = (plan, align, bench)
