"""``specrt export``: a bundle from a target and a draft."""

from __future__ import annotations

import platform
import sys
from typing import Any

import click

from specrt.engines.errors import UsageError
from specrt.tools.terminal.options import TRUST_REMOTE_CODE
from specrt.tools.terminal.outputs import OUTPUT_FOLDER


def _taps(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """``2,15,27`` as numbers."""
    try:
        return tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError as error:
        raise click.BadParameter(f"got {value!r}, expected numbers such as 2,15,27") from error


@click.command()
@click.argument("target")
@click.option("--output", "-o", required=True, type=OUTPUT_FOLDER, help="The bundle folder to write.")
@click.option(
    "--draft",
    default="ngram",
    show_default=True,
    metavar="DRAFT|ngram|self|skip:N|eagle3:HEAD",
    help="Where drafts come from.",
)
@click.option(
    "--num-speculative-tokens", "-k", default=5, show_default=True, help="K, the most drafted tokens per round."
)
@click.option("--max-seq-len", type=int, help="Context in tokens. [default: 2048, or the model's where shorter]")
@click.option("--prefill-chunk", default=512, show_default=True, help="Prompt tokens of one pass.")
@click.option("--dtype", help="Weights and KV of the target: fp32, fp16 or bf16. [default: fp32; on a GPU fp16]")
@click.option("--draft-dtype", help="Weights and KV of the draft. [default: --dtype]")
@click.option(
    "--quantize",
    default="none",
    show_default=True,
    help="Weights of the target: none, int8, w8a8 or int4 (TensorRT: none, int8 or int4).",
)
@click.option(
    "--draft-quantize", default="none", show_default=True, help="Weights of the draft: none, int8, w8a8 or int4."
)
@click.option(
    "--block-size", type=int, help="Weights of int8 and int4 that share a scale: 32, 64 or 128. [default: 32]"
)
@click.option(
    "--draft-vocab", type=int, metavar="N", help="Let the draft propose only the first N ids, with a smaller head."
)
@click.option(
    "--taps",
    metavar="A,B,C",
    callback=_taps,
    help="Hidden states of TARGET that a head reads: 0 is the embeddings, i follows the i-th layer. [default: scored]",
)
@click.option(
    "--norm",
    multiple=True,
    metavar="none|fc|fc-each|residual|output",
    help="A norm that a head was trained with (docs/heads.md); give each one, or none. [default: scored]",
)
@click.option(
    "--backend",
    default="onnxruntime",
    show_default=True,
    metavar="onnxruntime|tensorrt-rtx|tensorrt",
    help="The backend that will run the bundle.",
)
@click.option(
    "--device", metavar="cpu|cuda", help="Where it will run; cuda needs fp16. [default: the backend's first device]"
)
@click.option(
    "--tensorrt-version",
    metavar="VERSION",
    help="TensorRT that will run a bundle for tensorrt, as in 10.3 (JetPack 6). [default: current]",
)
@click.option("--revision", help="Commit, branch or tag of a hub target.")
@click.option("--draft-revision", help="Commit, branch or tag of a hub draft.")
@click.option("--adapter", metavar="DIR|HUB_ID", help="A LoRA adapter to merge into TARGET (needs peft).")
@click.option("--adapter-revision", help="Commit, branch or tag of a hub adapter.")
@click.option("--no-adapter", is_flag=True, help="Ignore an adapter in the folder of TARGET or DRAFT.")
@TRUST_REMOTE_CODE
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
def export(**options: Any) -> None:
    """Export TARGET (and a draft for it) into a bundle.

    TARGET and DRAFT are a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct, a local Hugging Face folder or a .gguf
    file. '--draft ngram' looks drafts up in the text so far and needs no model; '--draft self' is the target itself on
    a second KV slot, '--draft self:int8' the target with its weights in 8 bits, '--draft skip:N' N of its layers with
    the same weights. '--draft eagle3:HEAD' is an EAGLE-3 head, a hub id or a folder: official, speculators, SpecForge
    or AngelSlim.
    """
    if sys.version_info < (3, 11):
        raise UsageError(f"export: got Python {platform.python_version()}, expected 3.11 or later; bundles run on both")
    from specrt.tools.terminal.progress import quiet_libraries, shown_progress

    quiet_libraries()
    from specrt.exporter.export import export as run
    from specrt.exporter.options import ExportOptions

    with shown_progress() as progress:
        manifest = run(ExportOptions(**options), progress)
    for entry in filter(None, (manifest.target, manifest.draft.model)):
        if entry.quantization != "none":
            click.echo(
                f"{entry.source} in {entry.quantization}: {entry.weights_bytes / 1e6:.0f} MB, KL to the torch model "
                f"{entry.parity.mean_kl:.1e} nats, same argmax at {entry.parity.argmax_agreement:.0%} of positions"
            )
    parity = manifest.target.parity
    total = sum(entry.num_bytes for entry in manifest.files.values())
    click.echo(
        f"{options['output']}: {total / 1e6:.0f} MB; largest logit difference to the torch model "
        f"{parity.max_abs_error:.1e} (largest logit {parity.max_abs_logit:.1f}), "
        f"same argmax at {parity.argmax_agreement:.0%} of {parity.num_positions} positions"
    )
