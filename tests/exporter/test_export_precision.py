"""Exports in half precision: what they weigh, what overflows, and how far from the torch model a graph may be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Phi3Config

import specrt
from specrt.engines.contract import ONNXRUNTIME_DIALECT, STANDARD_DIALECT, ModelSpec
from specrt.engines.errors import (
    BackendError,
    ParityError,
)
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.storage.integrity import check_files
from specrt.exporter.options import ExportOptions
from specrt.exporter.parity.precision import FLOAT16_MAX, expected_logits, largest_activation
from specrt.exporter.parity.reference import check_parity, graph_logits, reference_logits
from specrt.exporter.tracing.longrope import longrope_note
from tests.exporter.tiny_pair import K, export_tiny
from tests.exports import Exports
from tests.progress import KeptProgress
from tests.tiny import save_tiny_model, tiny_llama_config


def test_fp16_bundle(exports: Exports, models: dict[str, Path]) -> None:
    bundle = exports.bundle(exports.model(), "self", 3, max_seq_len=96, prefill_chunk=32, dtype="fp16")
    manifest = manifest_from_bundle(bundle)
    full = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["target"]).parameters()) * 2
    assert manifest.target.spec.dtype == "float16"
    assert full <= manifest.target.weights_bytes <= full * 1.2
    assert specrt.load(bundle, threads=1).generate([5, 6], max_new_tokens=8, ignore_eos=True).token_ids


@pytest.mark.parametrize("dtype", [pytest.param("fp16", marks=pytest.mark.slow), "bf16"])
def test_bundle_for_tensorrt(models: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    """Both TensorRT backends run it; a bf16 graph is compared by its fp32 copy, which does not stay."""
    manifest = export_tiny(models, tmp_path / "bundle", backend="tensorrt", dtype=dtype)
    assert manifest.backends == ("tensorrt", "tensorrt-rtx")
    entry = manifest.target
    assert (entry.spec.dialect, entry.spec.dtype) == ("standard", {"fp16": "float16", "bf16": "bfloat16"}[dtype])
    assert entry.parity.max_abs_error <= {"fp16": 2e-2, "bf16": 1e-4}[dtype] * entry.parity.max_abs_logit
    check_files(tmp_path / "bundle", manifest, always_hash=True)
    assert not list(tmp_path.rglob("copy*"))
    full = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["target"]).parameters()) * 2
    assert full <= entry.weights_bytes <= full * 1.1
    with pytest.raises(BackendError, match=r"not installed; pip install|no engines for tensorrt"):
        specrt.load(tmp_path / "bundle")


def test_the_default_dtype_is_the_dialect_s(tmp_path: Path) -> None:
    for backend, dtype in (("onnxruntime", "float32"), ("tensorrt-rtx", "float16")):
        options = ExportOptions("x", tmp_path, backend=backend)
        assert [options.dtype_of(role) for role in ("target", "draft")] == [dtype, dtype]


def _hot(folder: Path, factor: float) -> Path:
    """A model whose activations grow ``factor`` times larger than the tiny Llama's."""
    save_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    hot = {name: tensor * factor if "down_proj" in name else tensor for name, tensor in weights.items()}
    save_file(hot, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_fp16_that_overflows_is_refused_for_tensorrt_and_bf16_holds(tmp_path: Path) -> None:
    target = {"target": _hot(tmp_path / "hot", 1e6)}
    with pytest.raises(ParityError, match="not finite; export in --dtype bf16"):
        export_tiny(target, tmp_path / "bundle", backend="tensorrt-rtx")
    assert list(tmp_path.iterdir()) == [target["target"]]
    export_tiny(target, tmp_path / "bundle", backend="tensorrt-rtx", dtype="bf16")


@pytest.mark.parametrize(("dialect", "wider"), [(STANDARD_DIALECT, "bf16"), (ONNXRUNTIME_DIALECT, "fp32")])
def test_fp16_values_near_the_limit_are_reported(dialect: str, wider: str) -> None:
    progress = KeptProgress()
    model = AutoModelForCausalLM.from_config(tiny_llama_config(), dtype=torch.float16).eval()
    ids = np.arange(8)
    spec = ModelSpec(320, 96, 100, 16, K + 1, "float16", (), dialect)
    logits = expected_logits(model, spec, ids, progress)
    assert progress.notes == []
    assert np.abs(logits).max() <= largest_activation(model, ids) < FLOAT16_MAX / 2
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7 * FLOAT16_MAX / float(np.abs(logits).max()))
    expected_logits(model, spec, ids, progress)
    (note,) = progress.notes
    assert "fp16 ends at 65504" in note and f"--dtype {wider} has room" in note


def test_overflow_in_fp16_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "hot", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1e3 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParityError, match="not finite"):
        export_tiny({"target": folder}, tmp_path / "bundle", dtype="fp16")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_graph_that_answers_otherwise_is_refused(pair: Path) -> None:
    entry = manifest_from_bundle(pair).target
    stored = np.load(pair / entry.reference)
    logits = graph_logits(pair / entry.graph, entry.spec, stored["ids"], threads=1)
    check_parity(pair / entry.graph, entry.spec, stored["ids"], logits, threads=1)
    logits[11, 3] += 0.01 * np.abs(logits).max()
    with pytest.raises(ParityError, match="differ from the torch model"):
        check_parity(pair / entry.graph, entry.spec, stored["ids"], logits, threads=1)


class _Unsteady:
    """A model whose passes differ ``times`` times before they settle."""

    dtype = torch.float32

    def __init__(self, times: int) -> None:
        self.left = times

    def set_attn_implementation(self, name: str) -> None: ...

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.left -= 1
        logits = torch.ones(1, input_ids.shape[1], 4) + max(self.left, 0) * 1e-3
        return SimpleNamespace(logits=logits)


def test_reference_is_what_two_passes_agree_on() -> None:
    ids = np.arange(3)
    assert (reference_logits(_Unsteady(0), ids) == 1).all()
    assert (reference_logits(_Unsteady(2), ids) == 1).all()
    with pytest.raises(ParityError, match="logits differ in every pass"):
        reference_logits(_Unsteady(9), ids)


def test_longrope_has_the_factors_of_the_bundle_s_context(exports: Exports) -> None:
    """Beyond the original context the ids are transformers'. The reference text is shorter, and is compared too."""
    original, rope = 64, {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8}
    rope |= {"long_factor": [1.0 + i for i in range(8)], "original_max_position_embeddings": original}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    llama = tiny_llama_config()
    sizes: dict[str, Any] = {
        name: getattr(llama, name) for name in (*names, "initializer_range", "bos_token_id", "eos_token_id")
    }
    lengths: dict[str, Any] = {"max_position_embeddings": 256, "original_max_position_embeddings": original}
    source = exports.model(Phi3Config(**sizes, **lengths, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.arange(3, 3 + original + 6)[None]
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, use_cache=False, eos_token_id=None)
    with specrt.load(exports.bundle(source, max_seq_len=128), threads=1) as runtime:
        found = runtime.generate(ids[0].tolist(), max_new_tokens=20, ignore_eos=True).token_ids
    assert found == expected[0, ids.shape[1] :].tolist()
    assert longrope_note(model, original) is None
    assert "--max-seq-len 64" in str(longrope_note(model, 128))
