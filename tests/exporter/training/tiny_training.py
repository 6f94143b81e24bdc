"""A tiny target that a head can learn, and small recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specrt.exporter.heads.config import HeadVariant
from specrt.exporter.training.prompts import own_prompts
from specrt.exporter.training.recipe import TextRecipe
from specrt.exporter.training.store import Store
from specrt.exporter.training.target import TrainingTarget
from specrt.exporter.training.writing import TextWriter
from tests.tiny import tiny_llama_config, tiny_tokenizer

TAPS = (2, 3, 4)
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def learnable_config() -> Any:
    """Seven layers whose changes are small against the embedding, so that the next token depends mostly on the last."""
    return tiny_llama_config(**SIZES, num_hidden_layers=7, initializer_range=0.05, tie_word_embeddings=False)


def learnable_model() -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(learnable_config())
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=1.0)
        model.get_output_embeddings().weight.normal_(std=0.6)
    return model.eval().requires_grad_(False)


def tiny_target(model: Any = None) -> TrainingTarget:
    tokenizer = tiny_tokenizer()
    return TrainingTarget("tiny", model or learnable_model(), tokenizer, TAPS, (tokenizer.eos_token_id,))


def small_text(num_tokens: int = 1500, **changes: Any) -> TextRecipe:
    sizes = {"num_lanes": 8, "max_prompt_tokens": 6, "max_answer_tokens": 24, **changes}
    return TextRecipe(minutes=None, num_tokens=num_tokens, **sizes)


def write_tiny_text(folder: Path, target: TrainingTarget, recipe: TextRecipe | None = None) -> Store:
    recipe = recipe or small_text()
    store = Store(folder, target.hidden_size)
    TextWriter(target, own_prompts(target.tokenizer, target.eos_ids, recipe), recipe).write(store)
    return store


VARIANT = HeadVariant(TAPS, fc_norm="each")
