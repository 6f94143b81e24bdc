"""Texts that the torch target writes, on which the variants of a head are scored."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from specrt.engines.progress import Progress
from specrt.exporter.heads.scoring import Text
from specrt.exporter.heads.taps import tapped

_REQUESTS = (
    "Explain in a few sentences how a rainbow forms.",
    "Write a short story about a lighthouse.",
    "Write a Python function that reverses a list, with an example.",
    "How do I cook rice? Answer step by step.",
)
NUM_TOKENS = 48  # written after each request


def written_texts(model: Any, tokenizer: Any, progress: Progress) -> list[Text]:
    """The greedy text of ``model`` after each request, in its chat template if it has one, with its hidden states.

    End-of-sequence ids are not written, so that every text has ``NUM_TOKENS``.
    """
    progress.step("draft: text of the target", total=len(_REQUESTS) * NUM_TOKENS)
    return [_text(model, _prompt(tokenizer, request), _ending_ids(model, tokenizer), progress) for request in _REQUESTS]


def _prompt(tokenizer: Any, request: str) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": request}]
        try:
            request = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception:  # a template may demand what is not known here; the request alone is a prompt too
            return list(tokenizer(request)["input_ids"])
        return list(tokenizer(request, add_special_tokens=False)["input_ids"])
    return list(tokenizer(request)["input_ids"])


def _ending_ids(model: Any, tokenizer: Any) -> list[int]:
    stated = getattr(model.generation_config, "eos_token_id", None)
    ids = stated if isinstance(stated, list) else [stated]
    return [token for token in {*ids, tokenizer.eos_token_id} if token is not None]


@torch.no_grad()
def _text(model: Any, prompt: list[int], ending_ids: list[int], progress: Progress) -> Text:
    ids, cache, step = list(prompt), DynamicCache(config=model.config), torch.tensor([prompt])
    for _ in range(NUM_TOKENS):
        logits = model(input_ids=step, cache=cache, use_cache=True).logits[0, -1].float()
        logits[ending_ids] = -torch.inf
        ids.append(int(logits.argmax()))
        step = torch.tensor([ids[-1:]])
        progress.advance(1)
    num_layers = model.config.get_text_config().num_hidden_layers
    with tapped(model, range(num_layers)) as found:
        choices = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1)
    states = [found[tap][0] for tap in range(num_layers)]
    return Text(torch.tensor(ids), choices, states, num_prompt=len(prompt))
