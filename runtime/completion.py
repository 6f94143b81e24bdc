"""A completion: the tokens of the prompt and those after it. Only this module decides where and why it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrt.runtime.sampling.grammar import Constraint
from specrt.runtime.settings import Settings


class Text(Protocol):
    """Searches the completion's text for stop strings; see ``specrt.runtime.text.stops.StopWatch``."""

    @property
    def matched(self) -> str | None: ...

    def push(self, token_id: int, may_stop: bool) -> bool: ...

    def end(self) -> None: ...


class NoText:
    """Ids only, without stop strings."""

    matched = None

    def push(self, token_id: int, may_stop: bool) -> bool:
        """See ``StopWatch.push``."""
        return False

    def end(self) -> None:
        """See ``StopWatch.end``."""


class Completion:
    """The completion of ``prompt`` under ``settings``, in a context of ``max_seq_len`` tokens.

    ``tokens`` holds the prompt and the tokens committed after it. Once it has ended, ``finish_reason`` is ``stop`` or
    ``length``, and ``stop`` is the stop string or the ending id that was found, if any. With a ``constraint`` it also
    ends when the grammar allows no further token.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        settings: Settings,
        max_seq_len: int,
        text: Text | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self.tokens, self.num_prompt_tokens = list(prompt), len(prompt)
        self.settings = settings
        self._ending_ids = frozenset(settings.ending_ids)
        self._end = min(len(prompt) + settings.max_new_tokens, max_seq_len)
        self._text, self.constraint = text or NoText(), constraint
        self.finish_reason: str | None = "length" if len(prompt) >= self._end else None
        self.stop: int | str | None = None

    @property
    def new_tokens(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_left(self) -> int:
        """How many more tokens may be appended; 0 once it has ended."""
        return 0 if self.finish_reason else self._end - len(self.tokens)

    def commit(self, ids: Sequence[int]) -> list[int]:
        """Append ``ids`` up to the first that ends the completion; return the appended ids."""
        emitted = []
        for token in ids:
            self.tokens.append(token)
            emitted.append(token)
            if self._ends_with(token):
                break
        return emitted

    def _ends_with(self, token: int) -> bool:
        """Set ``finish_reason`` and ``stop`` if the newest token, ``token``, is the last one."""
        text, is_ending_id, is_full = self._text, token in self._ending_ids, len(self.tokens) == self._end
        is_complete = self.constraint is not None and self.constraint.is_complete(self.tokens)
        text.push(token, len(self.tokens) - self.num_prompt_tokens >= self.settings.min_new_tokens)
        if text.matched is None and (is_ending_id or is_complete or is_full):
            text.end()  # an incomplete character that becomes text now may complete a stop string
        if text.matched is not None:
            self.finish_reason, self.stop = "stop", text.matched
        elif is_ending_id:
            self.finish_reason, self.stop = "stop", token
        elif is_complete:
            self.finish_reason = "stop"
        elif is_full:
            self.finish_reason = "length"
        return self.finish_reason is not None
