"""Models with quantized weights: loaded as the floats that they stand for, exported with the same ids, kept by int4."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

import specrt
from specrt.engines.errors import SourceError, UnsupportedModelError
from specrt.engines.interface import Array
from specrt.exporter.sources.merging import load_adapted
from specrt.exporter.sources.prequantized.methods import FORMATS
from specrt.exporter.sources.source import find_config, find_source
from tests.exporter.sources.prequantized.packed import (
    Levels,
    awq_parts,
    gptq_parts,
    packed_parts,
    random_levels,
    save_quantized,
)
from tests.exporter.tiny_pair import export_tiny
from tests.progress import KeptProgress
from tests.tiny import save_tiny_model, tiny_tokenizer

Parts = dict[str, torch.Tensor]
SIZE = 32


def of_levels(pack: Callable[[Levels], Parts], seed: int = 0, **kind: Any) -> Callable[..., tuple[Parts, Array]]:
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, int]) -> tuple[Parts, Array]:
        levels = random_levels(rng, *shape, SIZE, **kind)
        return pack(levels), levels.weight()

    return make


def in_8_bits(dtype: torch.dtype, scale: str, by_row: bool) -> Callable[..., tuple[Parts, Array]]:
    def make(shape: tuple[int, int]) -> tuple[Parts, Array]:
        stored = (torch.randn(shape) * 20).to(dtype)
        factors = torch.rand(shape[0] if by_row else 1) + 0.5
        divisor = 127 if scale == "SCB" else 1
        weight = stored.double().numpy() * factors.double().numpy()[:, None] / divisor
        return {"weight": stored, scale: factors if scale == "SCB" else factors[:, None]}, weight

    return make


def in_nf4(shape: tuple[int, int]) -> tuple[Parts, Array]:
    codes, table = torch.randint(0, 16, (shape[0] * shape[1],)), torch.linspace(-1, 1, 16)
    absmax = torch.rand(len(codes) // 64) + 0.5
    state = json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": shape})
    parts = {
        "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }
    return parts, (table[codes].view(-1, 64).double() * absmax[:, None]).view(shape).numpy()


def settings_of(form: str, bits: int) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": SIZE if form[0] == "p" else None}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm", "zero_point": True}
MODELS: dict[str, tuple[Callable[..., tuple[Parts, Array]], dict[str, Any], str | None]] = {
    "gptq": (of_levels(lambda levels: gptq_parts(levels, 4)), GPTQ, None),
    "gptq, in its own file": (of_levels(lambda levels: gptq_parts(levels, 4)), {"bits": 4}, "quantize_config.json"),
    "awq": (of_levels(awq_parts), AWQ, None),
    "awq, in its own file": (of_levels(awq_parts), {"w_bit": 4, "version": "GEMM"}, "quant_config.json"),
    "packed": (of_levels(lambda levels: packed_parts(levels, 4, False, False)), settings_of("pack-quantized", 4), None),
    "int8": (in_8_bits(torch.int8, "weight_scale", True), settings_of("int-quantized", 8), None),
    "float8": (in_8_bits(torch.float8_e4m3fn, "weight_scale", True), settings_of("float-quantized", 8), None),
    "fp8": (in_8_bits(torch.float8_e4m3fn, "weight_scale_inv", False), {"quant_method": "fp8"}, None),
    "bnb nf4": (in_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
    "bnb int8": (
        in_8_bits(torch.int8, "SCB", True),
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        None,
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_the_loaded_model_has_the_weights_that_are_stored(case: str, tmp_path: Path) -> None:
    make, settings, file = MODELS[case]
    weights = save_quantized(tmp_path / "model", make, settings, file)
    progress = KeptProgress()
    model = load_adapted(find_source(str(tmp_path / "model")), torch.float32, progress).model
    assert len(weights) == 14
    state = model.state_dict()
    for name, weight in weights.items():
        assert np.abs(state[name].numpy() - weight).max() <= 1e-6 * np.abs(weight).max(), name
    plain = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(state["lm_head.weight"], plain["lm_head.weight"])
    assert any("dequantized" in line for line in progress.notes)
    assert not hasattr(find_config(str(tmp_path / "model")), "quantization_config")


def _nbits(model: onnx.ModelProto) -> list[tuple[Array, int]]:
    """(weight [N, K], bits) of each MatMulNBits, by the formula of its documentation."""
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type != "MatMulNBits":
            continue
        attributes = {a.name: a.i for a in node.attribute}
        data, scales = stored[node.input[1]], stored[node.input[2]]
        if attributes["bits"] == 8:
            continue
        levels = np.stack([data & 15, data >> 4], -1).reshape(*scales.shape, -1)
        packed = stored[node.input[3]]
        zeros = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)[:, : scales.shape[1]]
        weight = (levels.astype(np.float64) - zeros[..., None]) * scales[..., None]
        found.append((weight.reshape(len(weight), -1)[:, : attributes["K"]], attributes["K"]))
    return found


def test_an_exported_model_gives_the_ids_of_its_floats_and_int4_keeps_its_weights(tmp_path: Path) -> None:
    """One export: the target in fp32, the draft in int4."""
    make, settings, _ = MODELS["gptq"]
    weights = save_quantized(tmp_path / "model", make, settings)
    export_tiny({"target": tmp_path / "model"}, tmp_path / "bundle", draft="self:int4")
    floats = _as_floats(tmp_path / "model", tmp_path / "floats", weights)
    ids = tiny_tokenizer()("The quick brown")["input_ids"]
    output = AutoModelForCausalLM.from_pretrained(floats).generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with specrt.load(tmp_path / "bundle") as runtime:
        found = runtime.generate(ids, max_new_tokens=24, ignore_eos=True).token_ids
    assert list(found) == output[0, len(ids) :].tolist()
    kept = _nbits(onnx.load(tmp_path / "bundle" / "draft" / "model.onnx"))
    expected = [
        np.concatenate([weights[f"model.layers.{layer}.{name}.weight"] for name in names])
        for layer in range(2)
        for names in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.o_proj",),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.down_proj",),
        )
    ]
    assert len(kept) == len(expected)
    for (weight, num_columns), wanted in zip(kept, expected, strict=True):
        assert num_columns == wanted.shape[1], "no columns of offsets"
        assert np.abs(weight - wanted).max() <= 1e-6 * np.abs(wanted).max()


def _as_floats(model: Path, folder: Path, weights: dict[str, Array]) -> Path:
    """The same model with float weights, for transformers."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    plain = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in plain.items() if name.endswith(".weight")}
    floats = {name: torch.from_numpy(weight).float() for name, weight in weights.items()}
    save_file({**kept, **floats}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_modules_that_keep_their_weight_transposed(tmp_path: Path) -> None:
    """GPT-2's Conv1D holds [K, N]; the files of a quantized one hold the same as those of a linear module."""
    folder = save_tiny_model(
        tmp_path / "gpt2", GPT2Config(vocab_size=320, n_embd=64, n_layer=1, n_head=2, n_positions=64)
    )
    make, settings, _ = MODELS["gptq"]
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))]:
        parts, weights[name] = make(tuple(tensors.pop(name).shape[::-1]))
        tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    state = load_adapted(find_source(str(folder)), torch.float32).model.state_dict()
    assert len(weights) == 4
    for name, weight in weights.items():
        (key,) = (k for k in state if k.endswith(name))
        assert np.abs(state[key].numpy() - weight.T).max() <= 1e-6 * np.abs(weight).max()


UNREAD: tuple[str, ...] = (
    "aqlm",
    "quanto",
    "quark",
    "fouroversix",
    "fp_quant",
    "eetq",
    "higgs",
    "hqq",
    "fbgemm_fp8",
    "torchao",
    "bitnet",
)
UNREAD += ("vptq", "spqr", "nvfp4", "mxfp8", "auto-round", "mxfp4", "metal", "sinq", "an-unknown-one")


@pytest.mark.parametrize("method", UNREAD)
def test_methods_that_are_not_read_are_named(method: str, models: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(models["target"], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": method}}))
    for find in (find_source, find_config):
        with pytest.raises(UnsupportedModelError, match=f"'{method}'") as error:
            find(str(tmp_path / "model"))
        assert "\n" not in str(error.value) and all(name in str(error.value) for name in FORMATS)


def test_settings_without_quantized_weights_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    (tmp_path / "model" / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(SourceError, match="no tensor of the files has such parts"):
        load_adapted(find_source(str(tmp_path / "model")), torch.float32)


def test_a_weight_of_another_shape_than_the_config_s_is_refused(tmp_path: Path) -> None:
    make, settings, _ = MODELS["gptq"]
    save_quantized(tmp_path / "model", lambda shape: make((shape[0], 2 * shape[1])), settings)
    with pytest.raises(SourceError, match=r"in its files.*config\.json makes it"):
        load_adapted(find_source(str(tmp_path / "model")), torch.float32)
