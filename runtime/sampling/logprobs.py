"""Log-probabilities of emitted tokens, from the target's logits before penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrt.engines.samplers import CHOSEN_IDS, LOGPROBS, TOKEN_LOGPROBS, TOP_IDS, TOP_LOGPROBS
from specrt.runtime.sampling.samplers import SlotSamplers


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms. ``top`` holds (id, log-probability), the most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Logprobs:
    """The ``logprobs`` sampler of a slot, on the rows that verified a round."""

    def __init__(self, samplers: SlotSamplers, num_top: int) -> None:
        self._binding = samplers.sampler(LOGPROBS)
        self._num_top = num_top

    def of(self, width: int, rows: int, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Log-probabilities of ``tokens``: of token ``i`` from row ``i``, which accepted, corrected or drew it."""
        host = self._binding.host
        host[CHOSEN_IDS][:rows] = 0
        host[CHOSEN_IDS][: len(tokens)] = tokens
        self._binding.upload(CHOSEN_IDS)
        self._binding.run(width, rows)
        num = len(tokens)
        top_ids, top_logs, chosen = self._binding.read(TOP_IDS, TOP_LOGPROBS, TOKEN_LOGPROBS)
        top = [
            tuple(zip(ids.tolist(), logs.tolist(), strict=True))
            for ids, logs in zip(top_ids[:num, : self._num_top], top_logs[:num, : self._num_top], strict=True)
        ]
        logprobs = chosen[:num].tolist()
        return [TokenLogprobs(*row) for row in zip(tokens, logprobs, top, strict=True)]
