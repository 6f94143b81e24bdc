"""Texts that a target writes itself, with what a head reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specrt.exporter.heads.scoring import Text

NUM_TEXTS, NUM_TOKENS = 8, 64
_REQUEST = "Write about anything you like."


def opening_ids(tokenizer: Any) -> list[int]:
    """What a text starts with: a request in the chat template, else the first special token, else a word."""
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": _REQUEST}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    return list(tokenizer("The", add_special_tokens=False)["input_ids"]) or [0]


@torch.no_grad()
def write_texts(
    model: Any,
    opening: Sequence[int],
    num_texts: int = NUM_TEXTS,
    num_tokens: int = NUM_TOKENS,
    seed: int = 0,
    context: int | None = None,
) -> list[Text]:
    """``num_texts`` texts of ``num_tokens`` ids after ``opening``, sampled at temperature 1 by a causal LM.

    End-of-sequence ids do not end them. The choices are the greedy ones at each position. Where the model's ``context``
    is too short for them, the opening is cut, and then the texts.
    """
    if context is not None:
        num_tokens = min(num_tokens, context - 1)
        opening = opening[: context - num_tokens]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        ids = _sampled(model, torch.tensor([list(opening)] * num_texts), num_tokens)
    out = model(ids, output_hidden_states=True)
    choices, states = out.logits.argmax(-1), [state.float() for state in out.hidden_states[:-1]]
    return [Text(ids[i], choices[i], [state[i] for state in states], len(opening)) for i in range(num_texts)]


def _sampled(model: Any, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[B, N + num_tokens]"""
    from transformers import DynamicCache

    fed, cache = ids, DynamicCache(config=model.config)
    for _ in range(num_tokens):
        rows = model(fed, cache=cache, use_cache=True).logits[:, -1]
        fed = torch.multinomial(rows.float().softmax(-1), 1)
        ids = torch.cat((ids, fed), dim=1)
    return ids
