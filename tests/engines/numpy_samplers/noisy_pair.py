"""Ways to decode with the tiny noisy pair of conftest.py, and what comes out."""

from __future__ import annotations

from typing import Any

from specrt.runtime.runtime import Runtime

K, NUM_TOKENS = 5, 40
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
BACKENDS = ("tensorrt-rtx", "tensorrt")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none"},
    "greedy": {"draft": "model"},
    "ngram": {"draft": "ngram"},
    "reproducible": {"draft": "model", "reproducible": True},
    "seed": {"draft": "model", "temperature": 0.8, "seed": 3},
    "seed, filters": {"draft": "model", "temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 40},
    "block": {"draft": "model", "temperature": 0.8, "seed": 3, "rule": "block", "top_p": 0.95},
    "block, min-p": {"draft": "model", "temperature": 0.8, "seed": 3, "rule": "block", "min_p": 0.01},
}
# What the host must see in between: more waits, the same ids.
SEEN: dict[str, dict[str, Any]] = {
    "penalties": {"draft": "model", "repetition_penalty": 1.3, "frequency_penalty": 0.3, "temperature": 0.8, "seed": 5},
    "bans": {"draft": "model", "banned_token_ids": [5, 6, 7], "min_new_tokens": 8},
    "logprobs": {"draft": "model", "logprobs": 2},
    "processors": {"draft": "model", "logits_processors": [lambda ids, logits: logits[::-1].copy()]},
    "regex": {"draft": "model", "regex": "([a-d]{2}[^a-z]?xyz)+", "temperature": 0.8, "seed": 3, "rule": "block"},
    "both": {"draft": "model", "presence_penalty": 0.4, "logits_processors": [lambda ids, logits: logits * 0.5]},
}


def generated(runtime: Runtime, prompt: Any = PROMPT, **way: Any) -> tuple[list[int], list[int], int]:
    """Ids, how many were accepted, and how much of the prompt was there already."""
    if way.get("draft") != "none":
        way.setdefault("num_speculative_tokens", K)
    result = runtime.generate(prompt, max_new_tokens=NUM_TOKENS, ignore_eos=True, **way)
    stats = result.stats
    return result.token_ids, stats.acceptance_histogram, stats.reused_prompt_tokens
