"""``specrt plan``: memory and times of a pair from configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.engines.errors import UsageError
from specrt.tools.terminal.options import TRUST_REMOTE_CODE

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("target")
@click.option(
    "--draft", default="ngram", show_default=True, metavar="DRAFT|ngram|eagle3[:N]", help="The draft's config."
)
@click.option("--device", help="One of the table ('--device list' shows it), or a file of specrt.tools.plan.calibrate.")
@click.option("--bandwidth", type=float, help="GB/s, without --device.")
@click.option("--tflops", type=float, help="Dense peak in the dtype's arithmetic, without --device.")
@click.option("--memory", type=float, help="GB, with --bandwidth and --tflops.")
@click.option("--dtype", help="fp32, fp16 or bf16.  [default: fp16; fp32 for a measured CPU]")
@click.option("--quantize", default="none", show_default=True, help="Weights of the target: none, int8, w8a8 or int4.")
@click.option("--draft-quantize", default="none", show_default=True, help="Weights of the draft.")
@click.option("--max-seq-len", type=int, help="Context in tokens.  [default: 2048, or the model's where shorter]")
@click.option("--past", type=int, help="Cached tokens to assume.  [default: half of the context]")
@click.option("--acceptance", type=float, default=0.8, show_default=True, help="Chance of each drafted token.")
@click.option("--from", "measured", type=FILE, help="Acceptance by position: the --json of align or bench.")
@TRUST_REMOTE_CODE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def plan(target: str, draft: str, as_json: bool, trust_remote_code: bool, **options: Any) -> None:
    """Predict memory and speed of TARGET with a draft on a device, from configs alone.

    TARGET and DRAFT are a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, a folder with a config.json, that file
    itself, or a .gguf file; no weight is read. '--draft eagle3:N' plans an EAGLE-3 head of N ids for TARGET.
    """
    from specrt.tools.terminal.progress import quiet_libraries

    quiet_libraries()
    from specrt.tools.plan.heads import head_cost_of, is_head
    from specrt.tools.plan.plan import MAX_K, acceptance_from_file, make_plan, print_plan
    from specrt.tools.plan.sizes import DEFAULT_MAX_SEQ_LEN, Shape, cost_of

    device = _device(options)
    if device is None:
        return
    dtype = options["dtype"] or ("fp16" if device.overlaps else "fp32")
    measured, given = options["measured"], (options["acceptance"],)
    acceptance = acceptance_from_file(measured, draft != "ngram") if measured else given
    length = DEFAULT_MAX_SEQ_LEN if options["max_seq_len"] is None else options["max_seq_len"]
    shape, draft_shape = (Shape(dtype, options[name], length, MAX_K) for name in ("quantize", "draft_quantize"))
    costs = [cost_of(target, shape, None, trust_remote_code)]
    head = head_cost_of(draft, target, draft_shape, None, trust_remote_code) if is_head(draft) else None
    if head is not None:
        costs.append(head.model)
    elif draft != "ngram":
        costs.append(cost_of(draft, draft_shape, None, trust_remote_code))
    if options["max_seq_len"] is not None and costs[0].max_seq_len < length:
        raise UsageError(
            f"--max-seq-len {length}: expected at most {costs[0].max_seq_len}, the context of {costs[0].name}"
        )
    made = make_plan(device, costs[0], costs[1] if costs[1:] else None, options["past"], acceptance)
    if as_json:
        click.echo(json.dumps(made.as_dict()))
    else:
        print_plan(made, head.lines() if head is not None else ())


def _device(options: dict[str, Any]) -> Any:
    """The requested device, or None after printing the table."""
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
    return vendor_device("your device", options["memory"], *figures, "--bandwidth and --tflops")
