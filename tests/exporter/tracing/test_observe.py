"""What cannot be exported faithfully is refused before any weight is read, in one line that lists what is supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from specrt.engines.contract import KVLayer
from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.tracing.attention import SUPPORTED, mask_of
from specrt.exporter.tracing.observe import observe
from tests.exporter.tracing.architectures import VOCAB_SIZE, WINDOW, tiny_config
from tests.exporter.tracing.model_types import tiny_config_of

_SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LONGROPE = {
    **_DEFAULT,
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
REFUSED: dict[str, tuple[Any, str]] = {
    "recurrent state": (hf.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2), "state space model"),
    "hybrid": (hf.JambaConfig(**_SMALL, num_key_value_heads=2), "linear_attention"),
    "gated delta net": (hf.Qwen3NextConfig(**_SMALL, num_key_value_heads=2), "linear_attention"),
    "latent attention": (hf.DeepseekV3Config(**_SMALL, num_key_value_heads=4), "latent attention"),
    "encoder-decoder": (hf.T5Config(), "encoder-decoder"),
    "alibi": (
        hf.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4),
        "own code, not through transformers'",
    ),
    "alibi by its code": (
        hf.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4),
        "with ALiBi position bias",
    ),
    "alibi by its config": (hf.FalconConfig(**_SMALL, alibi=True), "adds an ALiBi position bias"),
    "table of its own": (hf.FalconConfig(**_SMALL), "FalconDecoderLayer chooses its attention from its own table"),
    "local attention": (tiny_config_of("gpt_neo"), "with layers of local attention"),
    "attention of its own": (hf.XLMConfig(vocab_size=97, emb_dim=64, n_layers=2, n_heads=4), "in its own code"),
    "shared KV": (hf.Gemma3nTextConfig(), "lets its last 15 layers read the KV cache of earlier ones"),
    "cross-attention": (hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, add_cross_attention=True), "cross-attention"),
    "more than one text model": (hf.MusicgenConfig(), "more than one text model"),
    "sizes that do not fit": (hf.BertConfig(hidden_size=64, num_attention_heads=12), "cannot be built from its config"),
    "positions": (tiny_config_of("roberta"), "numbers its positions from the padding id on"),
    "values decide": (tiny_config_of("jetmoe"), "depends on the values of its tensors"),
    "loops": (tiny_config_of("hrm_text"), "runs more than once in a pass"),
    "chunked attention": (hf.Llama4TextConfig(**_SMALL, num_key_value_heads=2), "chunked_attention"),
    "attention sinks": (hf.GptOssConfig(**_SMALL, num_key_value_heads=2, head_dim=16), "attention sinks (s_aux)"),
    "dynamic rope": (
        tiny_config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
        "dynamic rope",
    ),
    "longrope of a layer type": (
        tiny_config("gemma3", rope_parameters={"full_attention": _LONGROPE, "sliding_attention": _DEFAULT}),
        "dynamic rope",
    ),
    "encoder": (hf.BertConfig(**_SMALL), "attention is bidirectional"),
    "vision": (hf.ViTConfig(), "no causal LM"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_before_weights(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as error:
        observe(config)
    message = str(error.value)
    assert "\n" not in message
    assert SUPPORTED in message
    assert reason in message


class _Broken(torch.nn.Module):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("first line\nsecond line")


def test_any_error_of_a_model_s_code_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.models.llama.modeling_llama.LlamaMLP, "forward", _Broken.forward)
    with pytest.raises(UnsupportedModelError) as error:
        observe(tiny_config("llama"))
    assert "AssertionError: first line second line" in str(error.value) and "\n" not in str(error.value)


def test_a_config_that_refuses_none_as_padding_is_observed() -> None:
    """modernbert-decoder's config once raised a validation error here."""
    assert len(observe(tiny_config_of("modernbert-decoder")).sites) == 2


def test_observed_facts() -> None:
    observation = observe(tiny_config("gemma3"))
    windows = [site.window for site in observation.sites]
    assert windows == [WINDOW, None]
    assert observation.kv_layers == (KVLayer(2, 16),) * 2
    assert observation.sites[0].scale == pytest.approx(256**-0.5)
    gemma2 = observe(tiny_config("gemma2"))
    assert [site.softcap for site in gemma2.sites] == [5.0, 5.0]
    assert observation.vocab_size == VOCAB_SIZE


def test_config_is_left_as_it_was() -> None:
    config = tiny_config("gpt2")
    before = config.to_dict()
    observe(config)
    assert config.to_dict() == before


def test_mask_is_found_by_evaluating_it() -> None:
    assert mask_of(causal_mask_function, None).window is None
    assert mask_of(sliding_window_causal_mask_function(5), 5).window == 5
    prefix = or_masks(causal_mask_function, lambda b, h, q, k: k < 3)
    holes = and_masks(causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0)
    chunked = chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long))
    cases = [
        (sliding_window_causal_mask_function(5), None),  # a window that nobody named
        (sliding_window_causal_mask_function(5), 6),  # off by one
        (causal_mask_function, 5),
        (prefix, None),
        (holes, None),
        (chunked, 5),
    ]
    for mask, hint in cases:
        with pytest.raises(UnsupportedModelError):
            mask_of(mask, hint)
