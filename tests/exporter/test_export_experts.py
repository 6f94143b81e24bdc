"""A mixture of experts from a model folder to generated ids, and with quantized experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import specrt
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.plan.sizes import Shape, cost_of
from tests.exports import Exports
from tests.tiny import tiny_llama_config

PROMPT, NUM_NEW, K = [5, 6, 7, 8], 40, 4


@pytest.fixture(scope="module")
def source(exports: Exports) -> Path:
    settings = tiny_llama_config().to_dict()
    names: tuple[str, ...] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    names += ("num_key_value_heads", "max_position_embeddings", "initializer_range", "bos_token_id", "eos_token_id")
    config = MixtralConfig(**{name: settings[name] for name in names}, num_local_experts=8, num_experts_per_tok=2)
    return exports.model(config)


@pytest.fixture(scope="module")
def bundle(source: Path, exports: Exports) -> Path:
    """With int8 weights of itself as the draft."""
    return exports.bundle(source, "self:int8", K, max_seq_len=96, prefill_chunk=16)


def test_it_generates_the_model_s_own_ids(source: Path, bundle: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    prompt = torch.tensor([PROMPT])
    wanted = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(PROMPT) :].tolist()
    with torch.no_grad():  # the negative control: the same model with its experts in another order
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.copy_(layer.mlp.experts.down_proj.roll(1, 0))
    other = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(PROMPT) :].tolist()
    with specrt.load(bundle, threads=1) as runtime:
        drafted = runtime.generate(
            PROMPT, max_new_tokens=NUM_NEW, ignore_eos=True, draft="model", num_speculative_tokens=K
        )
        plain = runtime.generate(PROMPT, max_new_tokens=NUM_NEW, ignore_eos=True, draft="none")
    assert len(wanted) == NUM_NEW
    assert drafted.token_ids == plain.token_ids == wanted != other
    assert drafted.stats.accepted > 0


def test_the_manifest_has_the_bytes_that_a_pass_reads(source: Path, bundle: Path) -> None:
    manifest = manifest_from_bundle(bundle)
    target, draft = manifest.target, manifest.draft.model
    assert target.experts is not None and draft is not None and draft.experts is not None
    assert (target.experts.num_layers, target.experts.num_experts, target.experts.experts_per_token) == (2, 8, 2)
    assert target.experts.bytes_per_expert == 3 * 64 * 96 * 4
    assert draft.experts.bytes_per_expert < target.experts.bytes_per_expert / 3
    assert draft.quantization == "int8" and draft.weights_bytes < target.weights_bytes / 3
    cost = cost_of(str(source), Shape("fp32", "none", 96, K))
    tables_bytes = target.spec.capacity * target.spec.kv_layers[0].head_dim * 4
    assert 0 <= target.bytes_per_pass - cost.bytes_per_pass <= tables_bytes
    assert cost.experts == target.experts
    assert cost.weights_bytes - cost.bytes_per_pass > 6 / 8 * 2 * 8 * target.experts.bytes_per_expert
    stored = json.loads((bundle / "bundle.json").read_text())
    assert stored["target"]["experts"]["num_experts"] == 8
    assert cost_of(str(source), Shape("bf16", "none", 96, K)).experts is None  # TensorRT's passes compute all
