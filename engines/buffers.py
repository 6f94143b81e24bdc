"""The memory plan of one slot: every buffer that target, draft and samplers bind, computed without allocating.

It follows the way slots are opened: a model owns its inputs, logits and KV; every sampler is opened on the model's
buffers and on the outputs of earlier samplers, by tensor name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from specrt.engines.backends import choose_backend, choose_device
from specrt.engines.contract import (
    FEATURE_CACHE,
    FEATURES,
    INPUT_IDS,
    ITEM_BYTES,
    LOGITS,
    ROW_INDICES,
    Contract,
    model_contract,
)
from specrt.engines.gpu.device import READ_BYTES, UPLOAD_BYTES, aligned
from specrt.engines.gpu.graphs import AREA_BYTES
from specrt.engines.interface import CPU
from specrt.engines.manifest import Manifest, ModelEntry
from specrt.engines.samplers import HOST_WRITTEN, MATCH, sampler_contract
from specrt.engines.trt.library import LIBRARIES


@dataclass(frozen=True)
class PlannedBuffer:
    """One bound tensor, ``owner/tensor``, at its largest shape. With an ``alias`` it is in that buffer's memory."""

    name: str
    num_bytes: int
    alias: str | None
    owner: str


def plan_slot(
    manifest: Manifest,
    backend: str,
    samplers: Sequence[str] = (MATCH,),
    device: str | None = None,
    scratch_bytes: int = 0,
) -> tuple[PlannedBuffer, ...]:
    """The buffers of a slot with its draft and these ``samplers`` of both models, opened in this order.

    All backends of a bundle bind the same contract. On a device, the tensors of a graph that the host writes are in one
    ``mailbox``, and three fixed areas belong to the device: two page-locked ones on the host, and ``scratch``, whose
    size is only known after loading. With TensorRT there is ``graphs`` as well, what CUDA graphs of rounds copy from.
    Raises ``BackendError`` for a backend or device that the bundle was not exported for.
    """
    is_on_device = choose_device(choose_backend(manifest, backend), device) != CPU
    target, draft = manifest.target, manifest.draft.model
    vocab_size = target.spec.vocab_size
    has_head = draft is not None and draft.spec.reads_features
    written = {FEATURES: f"draft/{FEATURE_CACHE}"} if has_head else {}
    plan = _plan_model("target", target, target.spec.max_rows, vocab_size, samplers, written)
    if manifest.draft.kind != "ngram":
        shared = {name: f"target/{name}" for name in _cache_of(target)} if manifest.draft.shares_kv else {}
        plan += _plan_model("draft", draft or target, 1, vocab_size, samplers, shared)
    if is_on_device:
        areas = {"uploads": UPLOAD_BYTES, "reads": READ_BYTES, "scratch": scratch_bytes}
        if backend in LIBRARIES:
            areas["graphs"] = AREA_BYTES * (1 if manifest.draft.kind == "ngram" else 2)
        plan = [
            *_with_mailboxes(plan),
            *(PlannedBuffer(f"device/{n}", size, None, "device") for n, size in areas.items()),
        ]
    return tuple(plan)


def allocated_bytes(plan: Sequence[PlannedBuffer]) -> int:
    """Total bytes of the buffers that have their own memory."""
    return sum(buffer.num_bytes for buffer in plan if buffer.alias is None)


def _plan_model(
    role: str, entry: ModelEntry, sampler_rows: int, vocab_size: int, samplers: Sequence[str], shared: dict[str, str]
) -> list[PlannedBuffer]:
    """``shared``: memory of another model, by tensor name."""
    plan = _plan_graph(role, model_contract(entry.spec), shared)
    memory = {name: f"{role}/{name}" for name in (LOGITS, INPUT_IDS, ROW_INDICES)}
    for sampler in samplers:
        owner = f"{role}/{sampler}"
        contract = sampler_contract(sampler, replace(entry.spec, max_rows=sampler_rows), vocab_size)
        plan += _plan_graph(owner, contract, memory)
        for tensor in (*contract.inputs, *contract.outputs):
            memory.setdefault(tensor.name, f"{owner}/{tensor.name}")
    return plan


def _cache_of(entry: ModelEntry) -> list[str]:
    return [tensor.alias for tensor in model_contract(entry.spec).outputs if tensor.alias is not None]


def _with_mailboxes(plan: Sequence[PlannedBuffer]) -> list[PlannedBuffer]:
    """Tensors that the host writes are in the mailbox of the graph that owns them."""
    mailboxes: dict[str, int] = {}
    placed = []
    for buffer in plan:
        if buffer.alias is None and buffer.name.removeprefix(f"{buffer.owner}/") in HOST_WRITTEN:
            mailboxes[buffer.owner] = mailboxes.get(buffer.owner, 0) + aligned(buffer.num_bytes)
            placed.append(replace(buffer, alias=f"{buffer.owner}/mailbox"))
        else:
            placed.append(buffer)
    return [*placed, *(PlannedBuffer(f"{owner}/mailbox", size, None, owner) for owner, size in mailboxes.items())]


def _plan_graph(owner: str, contract: Contract, memory: dict[str, str]) -> list[PlannedBuffer]:
    plan = []
    for tensor in (*contract.inputs, *contract.outputs):
        num_bytes = prod(tensor.resolve(contract.limits)) * ITEM_BYTES[tensor.dtype]
        alias = f"{owner}/{tensor.alias}" if tensor.alias else memory.get(tensor.name)
        plan.append(PlannedBuffer(f"{owner}/{tensor.name}", num_bytes, alias, owner))
    return plan
