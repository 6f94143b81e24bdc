"""``specrt export``: from a target and a draft to a bundle, step by step."""

from __future__ import annotations

import datetime
import importlib.metadata
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

import specrt
from specrt.engines.contract import STANDARD_DIALECTS, model_contract
from specrt.engines.errors import UnsupportedModelError, one_line
from specrt.engines.experts import Experts
from specrt.engines.interface import Array
from specrt.engines.manifest import (
    SCHEMA_VERSION,
    AdapterEntry,
    DraftEntry,
    Manifest,
    ModelEntry,
    manifest_from_bundle,
)
from specrt.engines.processor import available_cores
from specrt.engines.progress import SILENT, Progress
from specrt.exporter.bundle import check_output, file_entries, new_bundle, write_manifest
from specrt.exporter.cutting import choose_layers, keep_layers, restrict_head
from specrt.exporter.heads.export import WrittenHead, compare_head, write_head_graph
from specrt.exporter.heads.features import NO_FEATURES, Features, features_of
from specrt.exporter.heads.graph import append_fusing
from specrt.exporter.heads.plan import HeadPlan, plan_head
from specrt.exporter.options import MODEL_FREE_DRAFTS, ExportOptions
from specrt.exporter.pair import check_pair, compare_tokenizers
from specrt.exporter.parity.precision import expected_logits, runnable
from specrt.exporter.parity.reference import check_parity, reference_ids, save_reference
from specrt.exporter.passes import optimize
from specrt.exporter.passes.graph import bytes_per_pass, experts_of
from specrt.exporter.planning import ModelPlan, check_resources, plan_model
from specrt.exporter.quantization.blocks import quantize_weights
from specrt.exporter.quantization.experts import quantize_experts
from specrt.exporter.quantization.qdq import dequantize_weights
from specrt.exporter.samplers import write_samplers
from specrt.exporter.sources.adapters import AdapterChoice, find_adapted
from specrt.exporter.sources.ending import eos_ids, generation_defaults
from specrt.exporter.sources.merging import load_adapted
from specrt.exporter.sources.source import Source
from specrt.exporter.tokenizer import write_tokenizer
from specrt.exporter.tracing.trace import torch_dtype, trace
from specrt.exporter.writing import release_weights, write_model

_VERSIONED = ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnx-ir", "onnxruntime")


def export(options: ExportOptions, progress: Progress = SILENT) -> Manifest:
    """Write the bundle of ``options``; return its manifest. Raises ``SpecrtError`` and leaves nothing half-written."""
    check_output(options.output, options.force, progress)
    progress.step("reading configs")
    choice = AdapterChoice(options.adapter, options.adapter_revision, options.no_adapter)
    found = find_adapted(options.target, options.revision, options.trust_remote_code, choice)
    target = plan_model("target", found, options)
    draft = None
    head = plan_head(options, target, progress) if options.head is not None else None
    if head is not None:
        target = replace(target, spec=replace(target.spec, feature_size=head.spec.feature_size))
    elif options.draft not in MODEL_FREE_DRAFTS:
        source = target.source
        if not options.is_draft_of_target:
            choice = AdapterChoice(ignore=options.no_adapter)
            source = find_adapted(options.draft, options.draft_revision, options.trust_remote_code, choice)
        draft = plan_model("draft", source, options)
    eos = _eos(target)
    _check_draft(target, draft, eos, progress)
    if options.draft.startswith("self:") and model_contract(target.spec).swaps:
        progress.note(f"draft {options.draft}: has a KV cache of its own, as the target's changes place in every pass")
    plans = [target, *([draft] if draft else [])]
    check_resources(plans, options.output, progress, head)
    with new_bundle(options.output) as folder:
        progress.step("trying the tokenizer")
        tokenizer = write_tokenizer(
            target.source.name, target.source.tokenizer, folder, target.observation.vocab_size, progress
        )
        samplers = _write_samplers(plans, folder)
        models = _export_models(plans, folder, samplers, progress, head)
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
            draft=DraftEntry(kind, models[1] if draft or head else None, shares_kv=options.shares_kv),
            generation_defaults=generation_defaults(target.source.generation_config()),
            tokenizer=tokenizer,
            files=file_entries(folder, progress),
        )
        write_manifest(folder, manifest)
        return manifest_from_bundle(folder)


def _eos(plan: ModelPlan) -> tuple[int, ...]:
    source = plan.source
    return eos_ids(source.config, source.generation_config(), source.tokenizer, plan.observation.vocab_size)


def _check_draft(target: ModelPlan, draft: ModelPlan | None, eos: tuple[int, ...], progress: Progress) -> None:
    if draft is None:
        return
    compare_tokenizers(target.source.tokenizer.backend_tokenizer, draft.source.tokenizer.backend_tokenizer)
    for line in check_pair(eos, _eos(draft), target.spec.max_seq_len, draft.spec.max_seq_len):
        progress.note(line)


def _write_samplers(plans: list[ModelPlan], folder: Path) -> dict[str, dict[str, str]]:
    """The samplers of each role; a draft with as many ids as the target uses the target's."""
    vocab_size = plans[0].spec.vocab_size
    own = write_samplers(folder, "samplers", plans[0].spec, vocab_size)
    return {
        plan.role: own
        if plan.spec.vocab_size == vocab_size
        else write_samplers(folder, f"samplers/{plan.role}", plan.spec, vocab_size)
        for plan in plans
    }


@dataclass(frozen=True)
class _Written:
    """A model written to the bundle, and the logits its graph must reproduce: ``expected`` [N, V] for ``ids`` [N].

    ``features`` [N, H] are those that it must write, ``head`` is the graph that reads them.
    """

    plan: ModelPlan
    ids: Array
    expected: Array
    fingerprint: str
    weights_bytes: int
    bytes_per_pass: int
    experts: Experts | None
    features: Array | None = None
    head: WrittenHead | None = None


def _export_models(
    plans: list[ModelPlan],
    folder: Path,
    samplers: dict[str, dict[str, str]],
    progress: Progress,
    head: HeadPlan | None,
) -> list[ModelEntry]:
    """Load models of the same weights once, and free the weights before the graphs are compared."""
    entries = []
    for _, same in itertools.groupby(plans, lambda plan: (id(plan.source), plan.spec.dtype)):
        for written in _write_models(list(same), folder, progress, head):
            entries.append(_compare(written, folder, samplers[written.plan.role], progress))
            if written.head is not None:
                entries.append(compare_head(written.head, folder, samplers["target"], progress))
    return entries


def _write_models(plans: list[ModelPlan], folder: Path, progress: Progress, head: HeadPlan | None) -> list[_Written]:
    """Load the weights that ``plans`` share; write each model; free the weights."""
    source = plans[0].source
    progress.step(f"{plans[0].role}: loading weights")
    model, fingerprint = load_adapted(source, torch_dtype(plans[0].spec.dtype), progress)
    written: list[_Written] = []
    graphs: list[ir.Model] = []
    for plan in plans:
        (folder / plan.role).mkdir()
        if written and plan.spec == written[0].plan.spec:  # the same model in another quantization
            ids, expected, features = written[0].ids, written[0].expected, NO_FEATURES
        else:
            ids = reference_ids(source.tokenizer, plan.observation.vocab_size, plan.spec.max_seq_len)
            plan = _cut(model, plan, ids, progress)
            progress.step(f"{plan.role}: reference logits")
            expected = expected_logits(model, plan.spec, ids, progress)
            features = features_of(model, plan, ids, head, progress)
            progress.step(f"{plan.role}: tracing")
            traced = optimize(_trace(model, plan, features), plan.spec)
        graph = traced.clone()  # copies only the graph: tensors are shared
        if plan.quantization != "none":
            _quantize(graph, plan)
        if features.head is not None:
            append_fusing(graph, features.head.module)
        weights_bytes = write_model(graph, plan, folder / plan.graph, progress)
        read_bytes, experts = bytes_per_pass(graph), experts_of(graph)
        done = _Written(plan, ids, expected, fingerprint, weights_bytes, read_bytes, experts, features.expected)
        if features.head is not None:
            done = replace(done, head=write_head_graph(features.head, ids, folder, progress))
        written.append(done)
        graphs += [traced, graph]
    release_weights(model, graphs)
    del model, graphs, traced, graph
    return written


def _quantize(graph: ir.Model, plan: ModelPlan) -> None:
    if plan.spec.dialect in STANDARD_DIALECTS:
        dequantize_weights(graph, plan.quantization, plan.spec.vocab_size)
    else:
        quantize_weights(graph, plan.quantization, plan.spec.vocab_size, plan.block_size)
    quantize_experts(graph, plan.quantization)


def _compare(written: _Written, folder: Path, samplers: dict[str, str], progress: Progress) -> ModelEntry:
    """Compare the written graph with the torch model's logits; record both in the bundle."""
    plan, source, spec = written.plan, written.plan.source, written.plan.spec
    role, graph = plan.role, folder / plan.graph
    progress.step(f"{role}: comparing with the torch model")
    is_quantized = plan.quantization != "none"
    with runnable(graph, spec, is_quantized) as (checked, checked_spec):
        parity = check_parity(
            checked,
            checked_spec,
            written.ids,
            written.expected,
            available_cores(),
            is_quantized,
            written.features,
        )
    save_reference(folder / role / "reference.npz", written.ids, written.expected)
    for name, content in source.licenses().items():
        (folder / role / name).write_bytes(content)
    contract = model_contract(spec)
    return ModelEntry(
        source=source.name,
        revision=source.revision,
        fingerprint=written.fingerprint,
        architecture=source.architecture,
        graph=plan.graph,
        spec=spec,
        inputs=contract.inputs,
        outputs=contract.outputs,
        weights_bytes=written.weights_bytes,
        bytes_per_pass=written.bytes_per_pass,
        reference=f"{role}/reference.npz",
        parity=parity,
        samplers=samplers,
        quantization=plan.quantization,
        adapter=_adapter_entry(source),
        experts=written.experts,
    )


def _adapter_entry(source: Source) -> AdapterEntry | None:
    adapter = source.adapter
    return None if adapter is None else AdapterEntry(adapter.name, adapter.revision, adapter.sha256())


def _cut(model: Any, plan: ModelPlan, ids: Array, progress: Progress) -> ModelPlan:
    """Remove from ``model`` the layers, and the rows of its head, that the plan leaves out."""
    if plan.num_layers is not None:
        progress.step(f"{plan.role}: choosing layers")
        kept = choose_layers(model, plan.num_layers, ids)
        keep_layers(model, kept)
        progress.note(f"{plan.role}: layers {', '.join(map(str, kept))} of {len(plan.observation.kv_layers)}")
        plan = plan.with_layers(kept)
    if plan.spec.vocab_size < plan.observation.vocab_size:
        restrict_head(model, plan.spec.vocab_size)
    return plan


def _trace(model: Any, plan: ModelPlan, features: Features) -> ir.Model:
    try:
        return trace(model, replace(plan.spec, feature_size=features.num_columns), features.taps)
    except Exception as error:  # torch.export raises errors of many unrelated types
        line = one_line(error.__cause__ or error)
        raise UnsupportedModelError(
            f"{plan.source.name}: torch.onnx.export cannot trace {plan.source.architecture} ({line})"
        ) from error
