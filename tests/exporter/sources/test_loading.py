"""What is not in a model's files, or not read of them, is refused; what transformers rightly accepts is accepted."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, MixtralConfig

from specrt.engines.errors import SourceError
from specrt.exporter.sources.loading import load_model
from tests.exporter.sources.folders import Tensors, change_config, change_weights, load, save_model, source_of
from tests.exporter.sources.gguf.gguf_models import write_gguf
from tests.exporter.tracing.architectures import ROWS, tiny_model
from tests.progress import KeptProgress

PACKED = {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16}


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def prefixed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def plus(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.ones(*shape)}


def packed(**kinds: torch.dtype) -> Callable[[Tensors], Tensors]:
    """Each projection replaced by tensors that a quantized one has."""

    def change(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
        bases = [name.removesuffix(".weight") for name in tensors if "_proj." in name]
        return kept | {
            f"{base}.{kind}": torch.ones(8, 8, dtype=dtype) for base in bases for kind, dtype in kinds.items()
        }

    return change


def other_shape(tensors: Tensors) -> Tensors:
    name = "model.layers.1.mlp.up_proj.weight"
    return {**tensors, name: tensors[name][:-1]}


NOT_IN, UNREAD = "not in its files, the first is ", "read by nothing, the first is "
LAYERS = "config.json has num_hidden_layers"
REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, object], str]] = {
    "no head": (
        without("lm_head.weight"),
        {},
        f"1 tensor of the model is {NOT_IN}lm_head.weight; .*tie_word_embeddings",
    ),
    "one norm": (without("model.norm.weight"), {}, f"1 tensor of the model is {NOT_IN}model.norm.weight"),
    "compiled": (prefixed("_orig_mod."), {}, "21 tensors of the model are .*; 21 tensors of the files .*torch.compile"),
    "parallel": (prefixed("module."), {}, "DataParallel"),
    "peft": (prefixed("base_model.model."), {}, "peft"),
    "unknown prefix": (prefixed("net.inner."), {}, "without the prefix 'net.inner.'"),
    "more layers": (without(), {"num_hidden_layers": 4}, f"18 tensors of the model .*{LAYERS} 4, the files hold 2"),
    "fewer layers": (without(), {"num_hidden_layers": 1}, f"9 tensors of its files .*{LAYERS} 1, the files hold 2"),
    "gptq": (packed(**PACKED, g_idx=torch.int32), {}, "14 tensors of the model .*56 tensors of the files .*GPTQ"),
    "awq": (packed(**PACKED), {}, "AWQ or GPTQ weights"),
    "compressed": (packed(weight_packed=torch.int32, weight_scale=torch.float32), {}, "compressed-tensors weights"),
    "extra tensor": (plus("model.layers.0.self_attn.q_proj.bias", 64), {}, f"{UNREAD}model.layers.0.self_attn.q_proj"),
    "a mask that is a bias": (plus("model.layers.0.attn.bias", 64), {}, f"{UNREAD}model.layers.0.attn.bias"),
    "undeclared mtp": (plus("model.layers.2.eh_proj.weight", 4, 4), {}, UNREAD),
    "shape": (other_shape, {}, r"up_proj.weight is \[47, 64\] in its files, and config.json makes it \[48, 64\]"),
    "shape of the config": (without(), {"intermediate_size": 64}, "in its files, and config.json makes it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_another_model_is_refused(case: str, tmp_path: Path) -> None:
    change, config, message = REFUSED[case]
    folder = save_model(tmp_path / "m")
    change_weights(folder, change)
    change_config(folder, **config)
    with pytest.raises(SourceError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("m: ")


def test_a_missing_tensor_would_be_drawn_at_random(tmp_path: Path) -> None:
    """The control of the above: transformers itself gives two different models."""
    folder = save_model(tmp_path / "m")
    change_weights(folder, without("lm_head.weight"))
    heads = []
    for seed in range(2):
        torch.manual_seed(seed)
        heads.append(AutoModelForCausalLM.from_pretrained(folder).lm_head.weight)
    assert not torch.equal(*heads)


def causal(tensors: Tensors) -> Tensors:
    """What old files hold of each layer besides its weights."""
    mask = torch.ones(8, 8, dtype=torch.uint8).tril()[None, None]
    return {
        **tensors,
        "transformer.h.0.attn.bias": mask,
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }


ACCEPTED: dict[str, tuple[str, Callable[[Tensors], Tensors], dict[str, object], str]] = {
    "rotary tables": ("llama", plus("model.layers.0.self_attn.rotary_emb.inv_freq", 8), {}, "1 tensors .*rotary"),
    "causal masks": ("gpt2", causal, {}, "2 tensors .*causal masks"),
    "mtp": ("qwen3", plus("mtp.layers.0.fc.weight", 4, 4), {}, "multi-token-prediction"),
    "declared mtp": (
        "qwen3",
        plus("model.layers.2.eh_proj.weight", 4, 4),
        {"num_nextn_predict_layers": 1},
        "multi-token-prediction",
    ),
    "vision": ("gemma3", plus("vision_tower.blocks.0.weight", 4), {}, "image or audio tower"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_tensors_that_are_rightly_unread_are_noted(case: str, tmp_path: Path) -> None:
    name, change, config, message = ACCEPTED[case]
    folder = save_model(tmp_path / "m", name)
    change_weights(folder, change)
    change_config(folder, **config)
    notes = KeptProgress()
    load_model(source_of(folder), torch.float32, notes)
    assert len(notes.notes) == 1 and re.search(message, notes.notes[0])


def test_a_mask_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "gpt2")
    change_weights(folder, lambda tensors: causal(tensors) | {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8)})
    with pytest.raises(SourceError, match=r"the first is transformer\.h\.0\.attn\.bias"):
        load(folder)


@pytest.mark.parametrize("name", [*ROWS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_architecture_loads_with_nothing_missing_or_unread(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", name)
    loaded = load(folder, dtype).model
    expected = tiny_model(name).state_dict()
    assert all(torch.equal(tensor, expected[key].to(tensor.dtype)) for key, tensor in loaded.state_dict().items())


def test_names_without_the_base_model_s_prefix(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "llama-tied")
    expected = load(folder)
    change_weights(folder, lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()})
    assert "model.norm.weight" in expected.model.state_dict()
    found = load(folder)
    assert torch.equal(found.model.lm_head.weight, expected.model.lm_head.weight)
    assert found.fingerprint != expected.fingerprint


def test_old_names_of_norms_are_renamed_by_transformers(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    model = AutoModelForCausalLM.from_config(BertConfig(**sizes, num_attention_heads=4, is_decoder=True))
    with torch.no_grad():
        norm = model.bert.embeddings.LayerNorm.weight.normal_()
    model.save_pretrained(tmp_path / "m")
    change_weights(
        tmp_path / "m",
        lambda tensors: {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        },
    )
    assert torch.equal(load(tmp_path / "m").model.bert.embeddings.LayerNorm.weight, norm)


def test_a_tied_head_in_the_file_counts_as_it_is(tmp_path: Path) -> None:
    """Equal to the embedding it changes nothing; if it differs, transformers keeps it, and so does the export."""
    folder = save_model(tmp_path / "m", "llama-tied")
    embedding = load(folder).model.lm_head.weight
    change_weights(folder, lambda tensors: {**tensors, "lm_head.weight": embedding.detach().clone()})
    load(folder)
    change_weights(folder, lambda tensors: {**tensors, "lm_head.weight": embedding.detach() + 1})
    notes = KeptProgress()
    loaded = load_model(source_of(folder), torch.float32, notes).model
    assert torch.equal(loaded.lm_head.weight, embedding + 1)
    assert torch.equal(loaded.model.embed_tokens.weight, embedding)
    assert "lm_head.weight" in notes.notes[0] and "tie_word_embeddings" in notes.notes[0]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts that are separate in the files and merged in the model."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixtral") / "m"
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


def test_merged_experts_are_compared_with_the_file_s_own(mixtral: Path, tmp_path: Path) -> None:
    state = load(mixtral).model.state_dict()
    assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (3, 48, 32)


@pytest.mark.parametrize("weight", ["w1", "w2"])
def test_an_expert_that_is_absent(weight: str, mixtral: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(mixtral, tmp_path / "m"))
    change_weights(folder, without(f"model.layers.0.block_sparse_moe.experts.2.{weight}.weight"))
    with pytest.raises(SourceError, match=r"experts"):
        load(folder)


GGUF_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gpt2": ("gpt2", {}),
}


def gguf(folder: Path, name: str, extra: dict[str, Any] | None = None) -> Any:
    architecture, overrides = GGUF_ARCHITECTURES[name]
    model = tiny_model(name, **overrides)
    folder.mkdir()
    write_gguf(folder / "m.gguf", model, architecture, extra)
    return model, source_of(folder, "m.gguf", model.config)


@pytest.mark.parametrize("name", GGUF_ARCHITECTURES)
def test_gguf_tensors_are_compared_after_our_own_conversions(name: str, tmp_path: Path) -> None:
    model, source = gguf(tmp_path / "m", name)
    loaded = load_model(source, torch.float32).model.state_dict()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(loaded[key], tensor, rtol=0, atol=1e-6)


def test_a_gguf_tensor_that_transformers_skips_is_refused(tmp_path: Path) -> None:
    """Its loader silently drops unknown names."""
    _, source = gguf(tmp_path / "m", "llama", {"blk.0.attn_q.bias": torch.ones(64).numpy()})
    with pytest.raises(SourceError, match=r"read by nothing, the first is blk\.0\.attn_q\.bias"):
        load_model(source, torch.float32)
