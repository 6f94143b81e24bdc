"""The settings of a training run, in two parts: the text that is written, and the training on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specrt.engines.errors import UsageError

HELD_OUT_EVERY, HELD_OUT = 20, 5  # one conversation in 20 is held out: numbers 5, 25, 45, ...
_MIN_ANSWER_TOKENS = 16


@dataclass(frozen=True)
class TextRecipe:
    """How the target writes the text. Lengths in tokens.

    ``num_tokens`` None writes for ``minutes``. ``num_lanes`` conversations are written at the same time by torch. The
    model writes its own prompts at temperature 1. Half of the answers are greedy, half at ``temperature``.
    """

    minutes: float | None = 20.0
    num_tokens: int | None = None
    num_lanes: int = 32
    max_prompt_tokens: int = 80
    max_answer_tokens: int = 200
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.num_tokens is None):
            raise UsageError("text: got minutes and tokens, or neither; give one")
        if self.num_tokens is not None and self.num_tokens < 1:
            raise UsageError(f"--tokens {self.num_tokens}: expected 1 or more")
        _check_minutes(self.minutes, "text")

    @property
    def budget(self) -> int:
        """Tokens of the text, or seconds of writing."""
        return self.num_tokens if self.num_tokens is not None else round((self.minutes or 0) * 60)

    def reached(self, num_tokens: int, seconds: float) -> int:
        """How much of ``budget`` a text of ``num_tokens``, written in ``seconds``, is."""
        return min(self.budget, num_tokens if self.num_tokens is not None else int(seconds))

    def is_met_by(self, num_tokens: int, seconds: float) -> bool:
        """Whether a text of ``num_tokens``, written in ``seconds``, is all that is wanted."""
        return self.reached(num_tokens, seconds) >= self.budget

    def with_short_prompts(self, context: int) -> TextRecipe:
        """For a model of this context: the prompts that it writes take a quarter of it at most."""
        return replace(self, max_prompt_tokens=min(self.max_prompt_tokens, context // 4))

    def with_short_answers(self, longest_opening: int, context: int) -> TextRecipe:
        """Answers after the longest opening fit into the context. Raises ``UsageError`` if it leaves too little."""
        room = context - longest_opening
        if room < _MIN_ANSWER_TOKENS:
            raise UsageError(
                f"text: got prompts of up to {longest_opening} tokens in a context of {context}, expected "
                f"{_MIN_ANSWER_TOKENS} left for an answer; give shorter prompts, or a bundle with a larger context"
            )
        return replace(self, max_answer_tokens=min(self.max_answer_tokens, room))


@dataclass(frozen=True)
class TrainRecipe:
    """How the draft is trained. Sources: EAGLE-3 (arXiv 2503.01840), and shared losses of speculative distillation.

    ``num_steps`` None trains for ``minutes``. ``depth`` is the number of steps of training-time testing, weighted by
    ``decay`` to the power of the step. The loss is KL for the first ``kl_share`` of the training, then the negative
    logarithm of the expected acceptance. The learning rate rises over ``warmup_share`` and falls along a cosine.
    """

    minutes: float | None = 40.0
    num_steps: int | None = None
    depth: int = 3
    decay: float = 0.8
    kl_share: float = 1 / 3
    max_rate: float = 1e-3
    min_rate: float = 1e-5
    warmup_share: float = 0.03
    clip: float = 0.5
    tokens_per_step: int = 2048
    max_draft_vocab: int = 8192
    num_evaluations: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.num_steps is None):
            raise UsageError("training: got minutes and steps, or neither; give one")
        if self.num_steps is not None and self.num_steps < 1:
            raise UsageError(f"training steps: got {self.num_steps}, expected 1 or more")
        _check_minutes(self.minutes, "training")


def _check_minutes(minutes: float | None, part: str) -> None:
    if minutes is not None and not 0 < minutes < math.inf:
        raise UsageError(f"--minutes: got {minutes:g} for the {part}, expected a finite number above 0")
