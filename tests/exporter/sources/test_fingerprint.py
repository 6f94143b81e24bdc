"""The fingerprint: the same for the same weights, another for any other; and what the loader changes is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading as core
import transformers.modeling_gguf_pytorch_utils as gguf_loader
from safetensors.torch import load_file

from specrt.engines.errors import SourceError
from specrt.exporter.sources.checkpoint import open_checkpoint
from specrt.exporter.sources.fingerprint import Fingerprint, fingerprint_of
from specrt.exporter.sources.loading import load_model
from tests.exporter.sources.folders import WEIGHTS, Tensors, change_weights, load, save_model, source_of
from tests.exporter.sources.gguf.gguf_models import write_gguf
from tests.exporter.tracing.architectures import tiny_model

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"


def test_it_does_not_depend_on_the_files_the_seed_or_the_dtype_of_the_export(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    found = {load(folder, dtype).fingerprint for dtype in (torch.float32, torch.float16)}
    torch.manual_seed(5)
    found |= {load(folder).fingerprint, fingerprint_of(open_checkpoint(str(folder)))}
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    found.add(fingerprint_of(open_checkpoint(str(folder))))
    assert len(found) == 1 and len(found.pop()) == 64


def one_value(tensors: Tensors) -> Tensors:
    changed = tensors[Q].clone()
    changed[3, 5] += 1e-6
    return {**tensors, Q: changed}


OTHERS: dict[str, Callable[[Tensors], Tensors]] = {
    "a value": one_value,
    "a name": lambda tensors: {name.replace(Q, "q"): tensor for name, tensor in tensors.items()},
    "two exchanged": lambda tensors: {**tensors, Q: tensors[K], K: tensors[Q]},
    "a shape": lambda tensors: {**tensors, Q: tensors[Q].reshape(32, 128)},
    "a dtype": lambda tensors: {**tensors, Q: tensors[Q].view(torch.int32)},
    "one dropped": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != Q},
}


@pytest.mark.parametrize("case", OTHERS)
def test_any_other_weights_have_another(case: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m")
    before = fingerprint_of(open_checkpoint(str(folder)))
    change_weights(folder, OTHERS[case])
    assert fingerprint_of(open_checkpoint(str(folder))) != before


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_tensors_of_every_dtype_and_rank(dtype: torch.dtype) -> None:
    digests = set()
    for shape in ((), (0,), (1,), (2, 3), (3, 2)):
        fingerprint = Fingerprint()
        fingerprint.add("a", torch.ones(shape).to(dtype))
        digests.add(fingerprint.hexdigest())
    assert len(digests) == 5


def perturbed(setter: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """transformers' function that puts a tensor into the model, with a fault."""

    def faulty(model: Any, name: str, value: torch.Tensor, *rest: Any) -> None:
        setter(model, name, change(name, value), *rest)

    return faulty


def nudge(name: str, value: torch.Tensor) -> torch.Tensor:
    return value + 1e-3 * (torch.arange(value.numel()).view(value.shape) == 7) if name == Q else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loader_that_changes_one_value_is_found(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "m")
    load(folder, dtype)
    monkeypatch.setattr(core, "set_param_for_module", perturbed(core.set_param_for_module, nudge))
    with pytest.raises(SourceError, match=f"{Q} of the loaded model is not what its files hold"):
        load(folder, dtype)


def test_a_loader_that_exchanges_two_tensors_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missing and nothing is unread; only the values show it."""
    folder = save_model(tmp_path / "m")
    setter, exchanged = core.set_param_for_module, {Q: K, K: Q}

    def faulty(model: Any, name: str, *rest: Any) -> None:
        setter(model, exchanged.get(name, name), *rest)

    monkeypatch.setattr(core, "set_param_for_module", faulty)
    with pytest.raises(SourceError, match="is not what its files hold"):
        load(folder)


def test_a_loader_that_forgets_to_restore_llama_cpp_s_order_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "m.gguf", model, "llama")
    source = source_of(tmp_path, "m.gguf", model.config)
    load_model(source, torch.float32)
    monkeypatch.setitem(gguf_loader.TENSOR_PROCESSORS, "llama", gguf_loader.TensorProcessor)
    with pytest.raises(SourceError, match=r"q_proj\.weight of the loaded model is not what its files hold in blk\.0"):
        load_model(source, torch.float32)


class _Halved:
    """A checkpoint that was stored as twice its values, as a stand-in for a format that must be decoded."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def names(self) -> Any:
        return [name.removesuffix(".twice") for name in self._stored.names()]

    def read(self, name: str) -> torch.Tensor:
        return self._stored.read(f"{name}.twice") / 2  # type: ignore[no-any-return]


def test_a_decoded_checkpoint_is_given_to_the_model_and_checked_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fingerprint is that of the files as stored, for which nothing needs decoding."""
    from dataclasses import replace

    folder = save_model(tmp_path / "m")
    expected = load(folder).model.state_dict()
    change_weights(folder, lambda tensors: {f"{name}.twice": 2 * tensor for name, tensor in tensors.items()})
    source = replace(source_of(folder), decode=_Halved)
    loaded = load_model(source, torch.float32)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())
    assert loaded.fingerprint == fingerprint_of(open_checkpoint(str(folder)))
    monkeypatch.setattr(core, "set_param_for_module", perturbed(core.set_param_for_module, nudge))
    with pytest.raises(SourceError, match="is not what its files hold"):
        load_model(source, torch.float32)
