"""PLAIN by hand: decoding token by token from the definitions, in float64 and without a sampler.

Where logits, biases and penalties are multiples of powers of two, fp32 is exact too, and so are ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrt.engines.interface import Array
from specrt.engines.samplers import WITHIN
from specrt.runtime.sampling.uniforms import Uniforms
from specrt.runtime.settings import Settings
from tests.runtime.support.tables import Logits

ROUNDING = 1e-6  # closer to an edge than this, fp32 may decide otherwise


class NearEdge(Exception):
    """A decision that rounding may turn: about one of a million draws."""


def decode(table: Logits, settings: Settings, prompt: Sequence[int], max_seq_len: int = 256) -> list[int]:
    """The new ids, with the numbers of ``match``. Raises ``NearEdge``."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + settings.max_new_tokens, max_seq_len):
        logits = penalized(table(tokens), settings, tokens, len(prompt))
        if settings.temperature == 0:
            tokens.append(int(np.argmax(logits)))
        else:
            uniform = Uniforms(settings.seed or 0).at_positions(len(tokens), 1)[0, WITHIN]
            cdf = np.cumsum(distribution(logits, settings))
            tokens.append(int(np.searchsorted(cdf, _clear_of(cdf, float(uniform)), side="right")))
        if tokens[-1] in settings.ending_ids:
            break
    return tokens[len(prompt) :]


def penalized(logits: Array, settings: Settings, tokens: Sequence[int], num_prompt_tokens: int) -> Array:
    """The logits of the token after ``tokens``: biases, bans and penalties, then the processors. [V] f64"""
    logits, output = logits.astype(np.float64), tokens[num_prompt_tokens:]
    for token, bias in settings.logit_bias.items():
        logits[token] += bias
    logits[list(settings.banned_token_ids)] = -np.inf
    if len(output) < settings.min_new_tokens:
        logits[list(settings.ending_ids)] = -np.inf
    for token in set(tokens):
        penalty = settings.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= settings.presence_penalty + settings.frequency_penalty * list(output).count(token)
    for processor in settings.logits_processors:
        changed = processor(tokens, logits)
        logits = logits if changed is None else changed
    return logits


def distribution(logits: Array, settings: Settings) -> Array:
    """Probabilities after temperature, top-k, top-p and min-p, ties kept. [V] f64. Raises ``NearEdge``."""
    p: Array = np.exp((logits - logits.max()) / settings.temperature)
    if settings.top_k:
        p[p < np.sort(p)[-settings.top_k]] = 0
    p /= p.sum()
    floor = _clear_of(p, settings.min_p * p.max()) if settings.min_p else 0.0
    if settings.top_p < 1:
        most_likely = np.sort(p)[::-1]
        cumulated = np.cumsum(most_likely)
        floor = max(floor, most_likely[np.searchsorted(cumulated, _clear_of(cumulated, settings.top_p))])
    p[p < floor] = 0
    p /= p.sum()
    return p


def _clear_of(values: Array, edge: float) -> float:
    """``edge``, that none of the values above 0 comes near."""
    if (np.abs(values[values > 0] - edge) < ROUNDING * edge).any():
        raise NearEdge
    return edge
