"""Merge a LoRA adapter into the weights with ``peft``, and refuse what ``peft`` would silently leave out.

Checked: every tensor of the adapter's file is read and every tensor of its modules comes from the file, with the same
values; each adapted weight changes if and only if its adapter is not zero; the merged model gives the logits of the
base with the unmerged adapter.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from specrt.engines.errors import SourceError, SpecrtError, UnsupportedModelError, UsageError, kind_and_line
from specrt.engines.manifest import LOGITS_TOLERANCE
from specrt.engines.progress import SILENT, Progress
from specrt.exporter.sources.adapters import Adapter
from specrt.exporter.sources.checkpoint import refuse_lfs_pointer
from specrt.exporter.sources.loading import LoadedModel, load_model
from specrt.exporter.sources.source import Source

_NUM_IDS = 24
_SETTINGS_OF_NO_EFFECT = ("peft_version", "auto_mapping", "inference_mode")


def load_adapted(source: Source, dtype: torch.dtype, progress: Progress = SILENT) -> LoadedModel:
    """``load_model`` of ``source``, with its adapter, if it has one, merged. The fingerprint is that of the base.

    Raises as ``load_model`` and ``merge_adapter`` do.
    """
    for line in source.notes:
        progress.note(f"{source.name}: {line}")
    loaded = load_model(source, dtype, progress)
    if source.adapter is None:
        return loaded
    return LoadedModel(merge_adapter(loaded.model, source.adapter, source.name, progress), loaded.fingerprint)


def merge_adapter(model: Any, adapter: Adapter, base: str, progress: Progress) -> Any:
    """``model`` with ``adapter`` merged into its weights. It is changed in place.

    Raises ``UsageError`` without peft, ``SourceError`` for an adapter that is damaged or does not fit the model, and
    ``UnsupportedModelError`` for one that cannot be merged without a change of the logits.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UsageError(
            f"{adapter.name}: merging an adapter needs peft, which is not installed; pip install 'specrt[lora]'"
        ) from error
    tensors = read_tensors(adapter)
    _refuse_unknown_settings(adapter)
    ids = (torch.arange(_NUM_IDS) * 37 % model.get_input_embeddings().num_embeddings)[None]  # [1, N] i64
    with _peft(adapter, base), torch.no_grad():
        adapted = PeftModel.from_pretrained(model, str(adapter.folder), torch_device="cpu").eval()
        _check_tensors(adapter, adapted, tensors, base)
        _untie(adapted)
        expected = _logits(adapted, ids)
        if not _merge_layers(adapted, adapter):
            progress.note(f"{adapter.name}: changes no weight, since each of its products is zero")
        merged = adapted.merge_and_unload(safe_merge=True).eval()
        _compare(_logits(merged, ids), expected, merged.dtype, adapter)
    if adapter.base is not None and adapter.base.rstrip("/").split("/")[-1] != base.rstrip("/").split("/")[-1]:
        progress.note(f"{adapter.name}: was made for {adapter.base}, and is merged into {base}")
    return merged


def read_tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """The tensors of the adapter's file by name. Raises ``SourceError`` for a file that is damaged or holds none."""
    refuse_lfs_pointer(adapter.weights)
    try:
        if adapter.weights.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors = load_file(adapter.weights)
        else:
            tensors = torch.load(adapter.weights, map_location="cpu", weights_only=True)
        wrong = next((n for n, t in tensors.items() if not t.is_floating_point() or not torch.isfinite(t).all()), None)
    except Exception as error:  # a damaged file can make its reader raise anything
        raise SourceError(
            f"{adapter.weights}: truncated or damaged ({kind_and_line(error)}); download the adapter again"
        ) from error
    if not tensors:
        raise SourceError(f"{adapter.weights}: holds no tensor; download the adapter again")
    if wrong is not None:
        raise SourceError(f"{adapter.weights}: {wrong} holds values that are not finite floats; the adapter is broken")
    return tensors


def _refuse_unknown_settings(adapter: Adapter) -> None:
    """Refuse settings that the installed peft does not know: it would drop them with at most a warning."""
    from peft import LoraConfig

    known = {field.name for field in dataclasses.fields(LoraConfig)} | set(_SETTINGS_OF_NO_EFFECT)
    if unknown := sorted(key for key, value in adapter.settings.items() if key not in known and value):
        raise UnsupportedModelError(
            f"{adapter.name}: adapter_config.json sets {unknown[0]!r}, which the installed peft does not know; "
            "install the peft that wrote it, or merge the adapter there"
        )


def _check_tensors(adapter: Adapter, adapted: Any, tensors: dict[str, torch.Tensor], base: str) -> None:
    """Raise ``SourceError`` unless the modules hold the file's tensors, by name and by value."""
    from peft import get_peft_model_state_dict

    held = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    if missing := sorted(held.keys() - tensors.keys()):
        raise SourceError(
            f"{adapter.name}: {len(missing)} tensors are missing from its file, the first is {missing[0]}"
        )
    held = {**adapted.state_dict(), **held}
    if unread := sorted(tensors.keys() - held.keys()):
        raise SourceError(
            f"{adapter.name}: {len(unread)} tensors of its file have no module in {base}, the first is {unread[0]}; "
            "give the base that it was made for"
        )
    other = [name for name, tensor in tensors.items() if not torch.equal(held[name], tensor.to(held[name].dtype))]
    if other:
        raise SourceError(f"{adapter.name}: {other[0]} does not have its file's values after peft has read it")


def _untie(adapted: Any) -> None:
    """Copy an adapted weight that another module shares (embedding and head), so that only the adapted one changes."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    modules = list(adapted.modules())
    uses = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
    for layer in modules:
        if isinstance(layer, BaseTunerLayer):
            module = layer.get_base_layer()
            weight = getattr(module, "weight", None)
            if weight is not None and uses[id(weight)] > 1:
                module.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)


def _merge_layers(adapted: Any, adapter: Adapter) -> bool:
    """Merge layer by layer; return whether any weight changed. Raises when a weight that should change did not."""
    from peft.tuners.lora import Linear

    any_changed = False
    for name, layer in adapted.named_modules():
        if not isinstance(layer, Linear):
            continue
        module: Any = layer.get_base_layer()
        before: torch.Tensor = module.weight.detach().clone()
        expected = None if any(layer.lora_variant) else before + _delta(layer).to(before.dtype)
        layer.merge(safe_merge=True)
        any_changed |= not torch.equal(before, module.weight)
        if expected is not None and not torch.equal(module.weight, expected):
            raise UnsupportedModelError(f"{adapter.name}: peft did not add its product to {name}; merge it elsewhere")
    others = any(not isinstance(layer, Linear) for layer in _tuners(adapted))
    return any_changed or others


def _delta(layer: Any) -> torch.Tensor:
    """What the one adapter of ``layer`` adds to its weight."""
    (key,) = layer.active_adapters
    delta: torch.Tensor = layer.get_delta_weight(key)
    return delta


def _tuners(adapted: Any) -> Iterator[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return (m for m in adapted.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper))


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[N, V] f32"""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _compare(merged: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, adapter: Adapter) -> None:
    largest, difference = float(expected.abs().max()), float((merged - expected).abs().max())
    if not difference <= LOGITS_TOLERANCE[str(dtype).removeprefix("torch.")] * largest:  # NaN fails too
        raise UnsupportedModelError(
            f"{adapter.name}: the merged model's logits differ by {difference:.2g} (largest {largest:.2g}) from those "
            "with the unmerged adapter; export a model that it is already merged into instead"
        )


@contextmanager
def _peft(adapter: Adapter, base: str) -> Iterator[None]:
    """Silence peft's warnings, whose causes are checked here, and turn its exceptions into errors of one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except SpecrtError:
        raise
    except Exception as error:  # peft raises errors of many unrelated types
        made_for = f"; it was made for {adapter.base}" if adapter.base else ""
        raise SourceError(
            f"{adapter.name}: peft cannot merge it into {base} ({kind_and_line(error)}){made_for}"
        ) from error
