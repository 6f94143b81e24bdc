"""A tiny random model with its own tokenizer, which exports in a few seconds, for tests that need a bundle."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, EOS = "<|im_start|>", "<|im_end|>"
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
    "In the morning the birds sing in the old apple tree behind the house.",
)


@lru_cache
def tiny_tokenizer(vocab_size: int = 320) -> Any:
    """A byte-level BPE tokenizer that encodes any text, with ``BOS``, ``EOS`` and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE
    )


def tiny_llama_config(**overrides: Any) -> Any:
    """Two layers, four heads on two KV heads; weights large enough that the argmax is not a near-tie."""
    from transformers import LlamaConfig

    tokenizer = tiny_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return LlamaConfig(**{**settings, **overrides})


def save_tiny_model(folder: Path, config: Any = None, **overrides: Any) -> Path:
    """Write a Hugging Face model folder with random weights (seed 0) and the tiny tokenizer; return ``folder``.

    ``config`` is any causal LM's; without one it is ``tiny_llama_config(**overrides)``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if config is not None and overrides:
        raise ValueError(f"overrides {sorted(overrides)} are for the tiny Llama; set them in the config")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config if config is not None else tiny_llama_config(**overrides))
    model.eval().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
