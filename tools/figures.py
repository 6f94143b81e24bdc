"""Tables for terminals: the statistics of a generation and the content of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from specrt.engines.buffers import allocated_bytes, plan_slot
from specrt.engines.codec import to_json
from specrt.engines.contract import model_contract, past_name, plan_buffers
from specrt.engines.manifest import Manifest, ModelEntry
from specrt.engines.resident import ResidentMemory, resident_memory
from specrt.engines.trt.record import BuildRecord
from specrt.runtime.result import Result


def print_stats(result: Result, load_s: float, peak_bytes: int) -> None:
    """Print the statistics of ``result`` and of the process on standard error, with their definitions."""
    stats = result.stats
    table = Table(
        title=f"{stats.completion_tokens} tokens, finish reason: {result.finish_reason}", title_justify="left"
    )
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("meaning", style="dim")
    rows: list[tuple[str, Any, str]] = [
        ("tokens/s", stats.tokens_per_s, "after the first token"),
        ("rounds", stats.rounds, "target passes after the prefill"),
        ("drafted", stats.drafted, "drafted tokens that the target verified"),
        ("accepted", stats.accepted, "of those, emitted"),
        ("draft acceptance rate", stats.draft_acceptance_rate, "accepted / drafted"),
        ("mean acceptance length", stats.mean_acceptance_length, "tokens per round, the target's own included"),
        ("acceptance histogram", stats.acceptance_histogram, "rounds by accepted tokens, from 0"),
        ("drafted histogram", stats.drafted_histogram, "rounds by drafted tokens, from 0"),
        ("estimated speed-up", stats.estimated_speedup, "against plain rounds, with the controller's estimates"),
        ("load s", load_s, "the bundle; it is also hashed the first time on a machine"),
        ("first token ms", stats.time_to_first_token_ms, "after the request"),
        ("peak RSS MB", round(peak_bytes / 1e6), "of the process so far, mapped files included"),
        ("prefill ms", stats.prefill_ms, f"{stats.prompt_tokens} prompt tokens, target and draft"),
        ("draft ms", stats.draft_ms, "all rounds"),
        ("verify ms", stats.verify_ms, "all rounds"),
        ("host ms", stats.host_ms, "everything else"),
    ]
    for name, value, meaning in rows:
        table.add_row(
            name, "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value), meaning
        )
    Console(stderr=True).print(table)


def inspection(manifest: Manifest, builds: Sequence[BuildRecord] = ()) -> dict[str, Any]:
    """The JSON of ``specrt inspect --json``: the manifest, the bytes derived from it, and the engines built."""
    models = {"target": manifest.target, "draft": manifest.draft.model}
    derived = {
        role: {
            "weights_bytes": entry.weights_bytes,
            "kv_bytes_per_sequence": entry.spec.kv_bytes,
            "buffers": to_json(plan_buffers(model_contract(entry.spec))),
        }
        for role, entry in models.items()
        if entry is not None
    }
    plan = plan_slot(manifest, manifest.backends[0])
    slot = {"allocated_bytes": allocated_bytes(plan), "buffers": to_json(plan)}
    memory = to_json(resident_memory(manifest, builds))
    return {**to_json(manifest), "derived": {**derived, "slot": slot, "memory": memory}, "builds": to_json(builds)}


def print_inspection(manifest: Manifest, builds: Sequence[BuildRecord] = ()) -> None:
    """Print the bundle as tables on standard output."""
    console = Console()
    total = sum(entry.num_bytes for entry in manifest.files.values())
    k = manifest.num_speculative_tokens
    console.print(
        f"specrt {manifest.specrt_version} bundle, schema {manifest.schema_version}, {manifest.created_utc}, "
        f"{total / 1e6:.0f} MB in {len(manifest.files)} files, backends: {', '.join(manifest.backends)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"draft: {manifest.draft.kind}, K = {k}, width W = {k + 1}, EOS ids {list(manifest.eos_token_ids)}")
    for row in resident_memory(manifest, builds):
        console.print(_memory_line(row), highlight=False, soft_wrap=True)
    _print_model(console, "target", manifest.target)
    if manifest.draft.model is not None:
        _print_model(console, "draft", manifest.draft.model)


def _memory_line(row: ResidentMemory) -> str:
    if row.private_bytes is None:
        weights = "its engines are not built"
    elif row.mapped_bytes:
        weights = (
            f"weights {row.private_bytes / 1e6:.1f} MB in memory and {row.mapped_bytes / 1e6:.1f} MB of mapped files"
        )
    else:
        weights = f"engines {row.private_bytes / 1e6:.1f} MB"
    return f"memory with {row.backend}: a sequence {row.slot_bytes / 1e6:.1f} MB (models and match samplers), {weights}"


def _print_model(console: Console, role: str, entry: ModelEntry) -> None:
    spec, parity = entry.spec, entry.parity
    quantized = "" if entry.quantization == "none" else f", weights in {entry.quantization}"
    adapter = f" with adapter {entry.adapter.source} ({entry.adapter.sha256[:12]})" if entry.adapter else ""
    console.print(
        f"\n[bold]{role}[/bold]: {entry.architecture} from {entry.source}{adapter}", highlight=False, soft_wrap=True
    )
    console.print(
        f"weights {entry.weights_bytes / 1e6:.0f} MB ({spec.dtype}{quantized}), "
        f"KV {spec.kv_bytes / 1e6:.1f} MB a sequence "
        f"({len(spec.kv_layers)} layers, capacity {spec.capacity}), context {spec.max_seq_len}, "
        f"prefill chunk {spec.max_width}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"parity at export: largest logit difference {parity.max_abs_error:.1e} of {parity.max_abs_logit:.1f}, "
        f"same argmax at {parity.argmax_agreement:.0%} of {parity.num_positions} positions, "
        f"KL {parity.mean_kl:.1e} nats",
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    for column in ("", "tensor", "dtype", "shape", "memory of"):
        table.add_column(column)
    later_layers = {past_name(part, layer) for layer in range(1, len(spec.kv_layers)) for part in ("key", "value")}
    for kind, tensors in (("in", entry.inputs), ("out", entry.outputs)):
        for tensor in tensors:
            if tensor.name not in later_layers and tensor.alias not in later_layers:
                shape = ", ".join(map(str, tensor.shape))
                table.add_row(kind, tensor.name, tensor.dtype, f"[{shape}]".replace("[", "\\["), tensor.alias or "")
    if later_layers:
        table.add_row("", f"... and so on for {len(spec.kv_layers)} layers", "", "", "")
    console.print(table)
