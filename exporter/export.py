"""``specrt export``: a target and a draft go in, a bundle comes out. The order of the work is this file."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import psutil

import specrt
from specrt.engines.cpu import available_cores
from specrt.engines.errors import UnsupportedModelError, UsageError
from specrt.engines.manifest import (
    SCHEMA_VERSION,
    DraftEntry,
    Manifest,
    ModelEntry,
    TokenizerEntry,
    manifest_from_bundle,
)
from specrt.engines.progress import Progress, Silent
from specrt.engines.spec import ITEM_BYTES, STANDARD_DIALECT, ModelSpec, model_contract
from specrt.exporter.bundle import check_disk, check_output, file_entries, new_bundle, write_manifest
from specrt.exporter.heads import write_heads
from specrt.exporter.observe import Observation, observe
from specrt.exporter.options import DEFAULT_MAX_SEQ_LEN, MODEL_FREE_DRAFTS, ExportOptions
from specrt.exporter.pair import check_pair, compare_tokenizers, eos_ids, generation_defaults
from specrt.exporter.passes import optimize
from specrt.exporter.passes.dequantize import LAYOUTS, dequantize_weights
from specrt.exporter.passes.graph import bytes_per_pass
from specrt.exporter.passes.quantize import QUANTIZATIONS, quantize_weights
from specrt.exporter.precision import expected_logits, runnable
from specrt.exporter.reference import check_parity, reference_ids, save_reference
from specrt.exporter.source import Source, find_source
from specrt.exporter.trace import torch_dtype, trace

_VERSIONED = ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnx-ir", "onnxruntime")


@dataclass(frozen=True)
class _Plan:
    """One model to export: where from, where to, and its derived spec."""

    role: str
    source: Source
    observation: Observation
    spec: ModelSpec
    quantization: str

    @property
    def weights_bytes(self) -> int:
        """Bytes of the model while it is loaded; a bf16 one is compared in fp32."""
        item_bytes = 4 if self.spec.dtype == "bfloat16" else ITEM_BYTES[self.spec.dtype]
        return self.observation.num_parameters * item_bytes

    @property
    def written_bytes(self) -> int:
        if self.quantization == "none":
            twin_bytes = self.weights_bytes if self.spec.dtype == "bfloat16" else 0
            return self.observation.num_parameters * ITEM_BYTES[self.spec.dtype] + twin_bytes
        rows = LAYOUTS if self.spec.dialect == STANDARD_DIALECT else QUANTIZATIONS
        return int(self.observation.num_parameters * rows[self.quantization].bytes_per_weight)


def export(options: ExportOptions, progress: Progress | None = None) -> Manifest:
    """Write the bundle of ``options``; return its manifest. Raises ``SpecrtError`` and leaves nothing half-written."""
    progress = progress or Silent()
    check_output(options.output, options.force)
    progress.step("reading configs")
    target = _plan("target", find_source(options.target, options.revision, options.trust_remote_code), options)
    draft = None
    if options.draft not in MODEL_FREE_DRAFTS:
        name, revision = options.draft, options.draft_revision
        if name.startswith("self:"):
            name, revision = options.target, options.revision
        source = find_source(name, revision, options.trust_remote_code)
        draft = _plan("draft", source, options)
    eos = _eos(target.source)
    _check_draft(target, draft, eos, progress)
    plans = [target, *([draft] if draft else [])]
    _check_resources(plans, options.output, progress)
    with new_bundle(options.output) as folder:
        heads = _write_heads(plans, folder)
        models = [_export_model(plan, folder, heads[plan.role], progress) for plan in plans]
        tokenizer = _write_tokenizer(target.source, folder)
        kind = options.draft if options.draft in MODEL_FREE_DRAFTS else "model"
        progress.step("hashing", total=sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            specrt_version=specrt.__version__,
            created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions={name: importlib.metadata.version(name) for name in _VERSIONED},
            backends=options.backends,
            num_speculative_tokens=options.num_speculative_tokens,
            eos_token_ids=eos,
            target=models[0],
            draft=DraftEntry(kind, models[1] if draft else None),
            generation_defaults=generation_defaults(target.source.generation_config()),
            tokenizer=tokenizer,
            files=file_entries(folder, progress.advance),
        )
        write_manifest(folder, manifest)
        return manifest_from_bundle(folder)


def _plan(role: str, source: Source, options: ExportOptions) -> _Plan:
    observation = observe(source.config, options.trust_remote_code)
    longest = observation.max_position_embeddings
    wanted = options.max_seq_len or DEFAULT_MAX_SEQ_LEN
    if role == "target" and options.max_seq_len and longest and options.max_seq_len > longest:
        raise UsageError(f"--max-seq-len {options.max_seq_len}: {source.name} has a context of {longest}; ask for less")
    max_seq_len = min(wanted, longest) if longest else wanted
    k = options.num_speculative_tokens
    spec = ModelSpec(
        vocab_size=observation.vocab_size,
        max_seq_len=max_seq_len,
        capacity=max_seq_len + k,
        max_width=min(options.prefill_chunk, max_seq_len),
        max_rows=k + 1,
        dtype=options.dtype_of(role),
        kv_layers=observation.kv_layers,
        dialect=options.dialect,
    )
    quantization = options.quantize if role == "target" else options.draft_quantize
    return _Plan(role, source, observation, spec, quantization)


def _eos(source: Source) -> tuple[int, ...]:
    return eos_ids(source.config, source.generation_config(), source.tokenizer)


def _check_draft(target: _Plan, draft: _Plan | None, eos: tuple[int, ...], progress: Progress) -> None:
    if draft is None:
        return
    compare_tokenizers(target.source.tokenizer.backend_tokenizer, draft.source.tokenizer.backend_tokenizer)
    for line in check_pair(eos, _eos(draft.source), target.spec.max_seq_len, draft.spec.max_seq_len):
        progress.note(line)


def _check_resources(plans: list[_Plan], output: Path, progress: Progress) -> None:
    """Say what the export takes in bytes; refuse when the disk cannot hold it."""
    weights = sum(plan.written_bytes for plan in plans)
    kv = sum(plan.spec.kv_bytes for plan in plans)
    disk = int(weights * 1.05) + (64 << 20)
    memory = int(max(plan.weights_bytes for plan in plans) * 1.3) + (1 << 30)  # 1.26 measured on 7.1 GB
    progress.note(
        f"needs about {disk / 1e9:.2f} GB of disk and {memory / 1e9:.2f} GB of memory; "
        f"a sequence of the bundle will take {kv / 1e6:.0f} MB of KV"
    )
    available = psutil.virtual_memory().available
    if available < memory:
        progress.note(f"only {available / 1e9:.2f} GB of memory are available: this may swap or be killed")
    check_disk(output, disk)


def _write_heads(plans: list[_Plan], folder: Path) -> dict[str, dict[str, str]]:
    """The heads of each role; a draft with as many ids as the target uses the target's."""
    vocab_size = plans[0].spec.vocab_size
    own = write_heads(folder, "heads", plans[0].spec, vocab_size)
    return {
        plan.role: own
        if plan.spec.vocab_size == vocab_size
        else write_heads(folder, f"heads/{plan.role}", plan.spec, vocab_size)
        for plan in plans
    }


def _export_model(plan: _Plan, folder: Path, heads: dict[str, str], progress: Progress) -> ModelEntry:
    """Load, record the reference, trace, optimize, save, free, then compare the written graph with the reference."""
    role, source, spec = plan.role, plan.source, plan.spec
    (folder / role).mkdir()
    graph = folder / role / "model.onnx"
    progress.step(f"{role}: loading weights")
    model = source.load_model(torch_dtype(spec.dtype))
    progress.step(f"{role}: reference logits")
    ids = reference_ids(source.tokenizer, spec.vocab_size)
    expected = expected_logits(model, spec, ids, progress.note)
    progress.step(f"{role}: tracing")
    traced = _trace(model, plan)
    optimize(traced, spec)
    if plan.quantization != "none":
        store = dequantize_weights if spec.dialect == STANDARD_DIALECT else quantize_weights
        store(traced, plan.quantization, spec.vocab_size)
    read_bytes = bytes_per_pass(traced)
    _save(traced, graph, f"{role}: writing", progress)
    release_weights(model, traced)
    del model, traced
    gc.collect()
    progress.step(f"{role}: comparing with the torch model")
    with runnable(graph, spec) as (checked, checked_spec):
        parity = check_parity(checked, checked_spec, ids, expected, available_cores(), plan.quantization != "none")
    save_reference(folder / role / "reference.npz", ids, expected)
    for name, content in source.licenses().items():
        (folder / role / name).write_bytes(content)
    contract = model_contract(spec)
    return ModelEntry(
        source=source.name,
        revision=source.revision,
        architecture=source.architecture,
        graph=f"{role}/model.onnx",
        spec=spec,
        inputs=contract.inputs,
        outputs=contract.outputs,
        weights_bytes=graph.with_name("model.onnx.data").stat().st_size,
        bytes_per_pass=read_bytes,
        reference=f"{role}/reference.npz",
        parity=parity,
        heads=heads,
        quantization=plan.quantization,
    )


def _trace(model: Any, plan: _Plan) -> ir.Model:
    try:
        return trace(model, plan.spec)
    except Exception as error:  # torch.export raises errors of many unrelated types
        line = " ".join(str(error.__cause__ or error).split())[:240]
        raise UnsupportedModelError(
            f"{plan.source.name}: torch.onnx.export cannot trace {plan.source.architecture} ({line})"
        ) from error


def _save(model: ir.Model, graph: Path, step: str, progress: Progress) -> None:
    """Write the graph, weights beside it in one file. Tensors become contiguous one at a time."""
    tensors = [v.const_value for v in model.graph.initializers.values() if v.const_value is not None]
    progress.step(step, total=sum(tensor.nbytes for tensor in tensors))
    ir.save(
        model,
        graph,
        external_data=graph.name + ".data",
        callback=lambda tensor, _: progress.advance(tensor.nbytes),
    )


def release_weights(model: Any, graph: ir.Model) -> None:
    """Free the memory of all weights now: onnxscript's rules remember the last graph they matched, and so all of it."""
    for parameter in model.parameters():
        parameter.data = parameter.new_empty(0)
    for value in graph.graph.initializers.values():
        value.const_value = None


def _write_tokenizer(source: Source, folder: Path) -> TokenizerEntry:
    """``tokenizer.json`` and the chat template, the target's."""
    place = folder / "tokenizer"
    place.mkdir()
    tokenizer = source.tokenizer
    tokenizer.backend_tokenizer.save(str(place / "tokenizer.json"))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        (place / "chat_template.jinja").write_text(template, encoding="utf-8")
    return TokenizerEntry(
        file="tokenizer/tokenizer.json",
        chat_template="tokenizer/chat_template.jinja" if template else None,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )
