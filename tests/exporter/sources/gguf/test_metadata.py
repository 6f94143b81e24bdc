"""What a GGUF file states is the model that is built: each architecture against its own model, and each refusal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrt.engines.errors import SourceError, SpecrtError, UnsupportedModelError
from specrt.exporter.sources.gguf.file import read_gguf
from specrt.exporter.sources.gguf.metadata import config_from_gguf
from specrt.exporter.sources.loading import load_model
from specrt.exporter.sources.source import find_config, find_source
from tests.exporter.sources.gguf.gguf_files import ARCHITECTURES, config_of, model_of, write_gguf

IDS = torch.arange(3, 60)[None]  # beyond every sliding window


def logits(model: Any) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def loaded_logits(path: Path) -> torch.Tensor:
    return logits(load_model(find_source(str(path)), torch.float32).model)


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_is_the_model_of_the_config_that_it_states(architecture: str, tmp_path: Path) -> None:
    model = model_of(config_of(architecture))
    path = write_gguf(tmp_path / "model.gguf", model, architecture)
    assert difference(loaded_logits(path), logits(model)) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("qwen2", "attention.layer_norm_rms_epsilon", 1.0),
        ("qwen2", "rope.freq_base", 100.0),
        ("phi3", "attention.sliding_window", 4),
        ("phi3", "rope.dimension_count", 4),
        ("gemma2", "attn_logit_softcapping", 1.0),
        ("gemma2", "final_logit_softcapping", 1.0),
        ("gemma2", "attention.sliding_window", 4),
        ("gemma3", "attention.sliding_window_pattern", [False, True]),
        ("gemma3", "rope.freq_base_swa", 100.0),
        ("gemma3", "rope.scaling.factor", None),
        ("starcoder2", "rope.freq_base", None),
        ("qwen3moe", "expert_weights_norm", False),
    ],
)
def test_a_key_with_another_value_is_another_model(architecture: str, key: str, value: Any, tmp_path: Path) -> None:
    """The negative control: what the comparison above would show if the key were not read."""
    model = model_of(config_of(architecture))
    path = write_gguf(tmp_path / "model.gguf", model, architecture, {key: value})
    assert difference(loaded_logits(path), logits(model)) > 1e-3


def test_absent_keys_have_llama_cpp_s_defaults(tmp_path: Path) -> None:
    config = config_of("qwen3", head_dim=16, num_key_value_heads=4, rope_theta=10000.0)
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    path = write_gguf(tmp_path / "model.gguf", model_of(config), "qwen3", dict.fromkeys(absent))
    found = find_config(str(path))
    assert (found.num_key_value_heads, found.head_dim, found.rope_parameters["rope_theta"]) == (4, 16, 10000.0)


def test_a_llama_without_kv_samplers_has_its_rows_in_order(tmp_path: Path) -> None:
    """transformers' loader leaves the rows of q and k interleaved when attention.head_count_kv is absent."""
    model = model_of(config_of("llama", num_key_value_heads=4))
    path = write_gguf(tmp_path / "model.gguf", model, keys={"attention.head_count_kv": None})
    source = find_source(str(path))
    assert difference(logits(load_model(source, torch.float32).model), logits(model)) < 1e-5
    left = type(model).from_pretrained(tmp_path, gguf_file="model.gguf", config=source.config)
    assert difference(logits(left), logits(model)) > 1e-2


def test_a_file_without_output_is_tied(tmp_path: Path) -> None:
    model = model_of(config_of("llama", tie_word_embeddings=True))
    path = write_gguf(tmp_path / "model.gguf", model)
    assert "output.weight" not in read_gguf(path).tensors
    assert difference(loaded_logits(path), logits(model)) < 1e-5


def test_biases_are_read(tmp_path: Path) -> None:
    model = model_of(config_of("llama", attention_bias=True, mlp_bias=True))
    path = write_gguf(tmp_path / "model.gguf", model)
    assert difference(loaded_logits(path), logits(model)) < 1e-5


# Metadata, tensors, the error and what its line has to name.
REFUSED: dict[str, tuple[str, dict[str, Any], type[SpecrtError], str]] = {
    "unknown key": ("llama", {"keys": {"attention.new_trick": 3}}, UnsupportedModelError, "llama.attention.new_trick"),
    "experts": ("llama", {"keys": {"expert_count": 8}}, UnsupportedModelError, "llama.expert_count is 8: a mixture"),
    "window": ("llama", {"keys": {"attention.sliding_window": 32}}, UnsupportedModelError, "attention.sliding_window"),
    "soft cap": ("qwen2", {"keys": {"attn_logit_softcapping": 50.0}}, UnsupportedModelError, "attn_logit_softcapping"),
    "logit scale": ("llama", {"keys": {"logit_scale": 0.25}}, UnsupportedModelError, "llama.logit_scale is 0.25"),
    "attention scale": ("llama", {"keys": {"attention.scale": 0.1}}, UnsupportedModelError, "llama.attention.scale"),
    "not causal": ("qwen3", {"keys": {"attention.causal": False}}, UnsupportedModelError, "qwen3.attention.causal"),
    "wider values": (
        "llama", {"keys": {"attention.value_length": 32}}, UnsupportedModelError, "llama.attention.value_length is 32"),
    "partial rotary": (
        "llama", {"keys": {"rope.dimension_count": 8}}, UnsupportedModelError, "llama.rope.dimension_count"),
    "odd rotary": ("phi3", {"keys": {"rope.dimension_count": 7}}, SourceError, "phi3.rope.dimension_count is 7"),
    "layers differ": (
        "llama", {"keys": {"attention.head_count_kv": [2, 1]}}, UnsupportedModelError, "differs from layer to layer"),
    "no layers": ("llama", {"keys": {"block_count": None}}, SourceError, "llama.block_count is missing"),
    "no heads": ("llama", {"keys": {"attention.head_count": 0}}, SourceError, "llama.attention.head_count is 0"),
    "heads as text": ("llama", {"keys": {"attention.head_count": "4"}}, SourceError, "attention.head_count is '4'"),
    "layout": ("llama", {"keys": {"tensor_data_layout": "rows"}}, UnsupportedModelError, "llama.tensor_data_layout"),
    "vocabulary": ("llama", {"keys": {"vocab_size": 300}}, SourceError, "vocab_size is 300, and token_embd.weight has"),
    "no embedding": ("llama", {"tensors": {"token_embd.weight": None}}, SourceError, "token_embd.weight is missing"),
    "no output": ("nemotron", {"tensors": {"output.weight": None}}, SourceError, "output.weight is missing"),
    "adapter": ("llama", {"others": {"general.type": "adapter"}}, SourceError, "general.type is 'adapter'"),
    "other kind": ("llama", {"others": {"clip.has_vision_encoder": True}}, UnsupportedModelError, "clip.has_vision"),
    "eos outside": (
        "llama", {"others": {"tokenizer.ggml.eot_token_id": 320}}, SourceError, "eot_token_id is 320, outside"),
    "eos as text": (
        "llama", {"others": {"tokenizer.ggml.eos_token_id": "1"}}, SourceError, "eos_token_id is '1', expected"),
    "unknown tokenizer key": (
        "llama", {"others": {"tokenizer.ggml.suppress": 3}}, UnsupportedModelError, "tokenizer.ggml.suppress"),
    "unknown splitting": (
        "llama", {"others": {"tokenizer.ggml.pre": "superbpe"}}, UnsupportedModelError, "pre is 'superbpe'"),
    "word pieces": ("llama", {"others": {"tokenizer.ggml.model": "bert"}}, UnsupportedModelError, "model is 'bert'"),
    "no tokens": ("llama", {"others": {"tokenizer.ggml.tokens": None}}, SourceError, "ggml.tokens is missing"),
    "part": (
        "llama", {"others": {"split.no": 1, "split.count": 2}}, SourceError,
        "part 2 of 2 of a split model, expected a whole one; join the parts with 'llama-gguf-split --merge"),
}  # fmt: skip


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    return {name: model_of(config_of(name)) for name in ("llama", "qwen2", "qwen3", "phi3", "nemotron")}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case: str, models: dict[str, Any], tmp_path: Path) -> None:
    architecture, changes, error, line = REFUSED[case]
    path = write_gguf(tmp_path / "model.gguf", models[architecture], architecture, **changes)
    with pytest.raises(error) as caught:
        find_source(str(path))
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert type(caught.value) is error


def test_an_unknown_architecture_is_refused(models: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", models["llama"], others={"general.architecture": None})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"llama", b"gamma"))
    with pytest.raises(UnsupportedModelError, match=r"GGUF architecture 'gamma', expected one of llama, qwen2"):
        find_config(str(path))


def test_what_changes_no_answer_is_accepted(models: dict[str, Any], tmp_path: Path) -> None:
    neutral = {
        "expert_count": 0,
        "attention.sliding_window": 4096,  # as wide as the context
        "attention.causal": True,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
        "rope.scaling.finetuned": True,
        "rope.scaling.type": "none",
        "rope.scaling.factor": 4.0,
        "tensor_data_layout": "Meta AI original pth",
        "pooling_type": 3,
        "logit_scale": 1.0,
        "vocab_size": 320,
    }
    others = {
        "general.name": "mistral",  # transformers then builds another architecture, with a sliding window
        "general.license": "mit",
        "general.quantization_version": 2,
        "split.count": 1,
        "quantize.imatrix.file": "x",
        "tokenizer.ggml.fim_pre_token_id": 3,
        "tokenizer.ggml.add_sep_token": False,
    }
    plain = write_gguf(tmp_path / "plain.gguf", models["llama"])
    path = write_gguf(tmp_path / "model.gguf", models["llama"], keys=neutral, others=others)
    assert find_config(str(path)).to_dict() == find_config(str(plain)).to_dict()
    assert find_source(str(path)).licenses()["LICENSE.txt"].endswith(b"general.license: mit\n")


@pytest.fixture(scope="module")
def plain(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("plain") / "model.gguf", models["llama"])


def damage(data: bytes, case: str) -> bytes:
    if case == "lfs":
        return b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    if case == "version 1":
        return data[:4] + (1).to_bytes(4, "little") + data[8:]
    if case == "big-endian":
        return data[:4] + (3).to_bytes(4, "big") + data[8:]
    if case == "cut in the header":
        return data[:2000]
    if case == "cut in the tensors":
        return data[:-1000]
    if case == "tensor twice":
        return data.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight", 1)
    if case == "count too large":
        return data[:16] + (2**60).to_bytes(8, "little") + data[24:]
    return {"empty": b"", "short": b"GGUF but not", "text": b"This is not a model, and long enough to be read."}[case]


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("lfs", "a Git-LFS pointer"),
        ("version 1", "GGUF version 1, expected 2 or 3"),
        ("big-endian", "a big-endian GGUF file"),
        ("cut in the header", "damaged or cut off in its header"),
        ("cut in the tensors", "ends at byte"),
        ("tensor twice", "tensor blk.0.attn_norm.weight twice"),
        ("count too large", "damaged or cut off in its header"),
        ("empty", "too short for a GGUF file"),
        ("short", "too short for a GGUF file"),
        ("text", "not a GGUF file"),
    ],
)
def test_a_damaged_file_is_one_line(case: str, line: str, plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(damage(plain.read_bytes(), case))
    for find in (find_source, find_config):
        with pytest.raises(SourceError) as caught:
            find(str(path))
        assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["UPPER.GGUF", "Mixed.Gguf"])
def test_the_suffix_may_be_in_capitals(name: str, plain: Path, tmp_path: Path) -> None:
    shutil.copy(plain, tmp_path / name)
    for given in (tmp_path / name, tmp_path):
        source = find_source(str(given))
        assert source.options == {"gguf_file": name}
    assert find_config(str(tmp_path)).to_dict() == find_config(str(plain)).to_dict()
    shutil.copy(plain, tmp_path / "second.gguf")
    with pytest.raises(SourceError, match=r"no config\.json in this folder"):
        find_source(str(tmp_path))


def test_a_file_that_changed_is_read_again(models: dict[str, Any], tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", models["llama"])
    first = config_from_gguf(read_gguf(path)).max_position_embeddings
    write_gguf(path, models["llama"], keys={"context_length": 1024})
    assert (first, config_from_gguf(read_gguf(path)).max_position_embeddings) == (64, 1024)


def test_recommended_sampling_is_the_model_s_default(models: dict[str, Any], plain: Path, tmp_path: Path) -> None:
    from specrt.exporter.sources.ending import generation_defaults

    others = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.mirostat": 0}
    path = write_gguf(tmp_path / "model.gguf", models["llama"], others=others)
    assert generation_defaults(find_source(str(path)).generation_config()) == {"temperature": 0.5, "top_k": 20.0}
    assert generation_defaults(find_source(str(plain)).generation_config()) == {}


def test_floats_of_blocks_are_refused(models: dict[str, Any], tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(3, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", models["llama"], tensors=factors)
    with pytest.raises(SourceError, match=r"rope_freqs.weight has 3 values, expected 8 positive numbers"):
        find_config(str(path))
