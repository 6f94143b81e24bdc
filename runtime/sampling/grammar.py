"""Structured output: the ids that a grammar allows after a prefix, from llguidance, for target and draft.

A mask depends on the prefix alone, not on earlier drafted and rejected ids, so speculation with masked p and masked q
is exact. The mask allows every id after which the grammar can still be completed, not only the canonical tokens of a
text that the grammar forces. An end-of-sequence id is allowed where the text may end. If no other id is allowed, the
text is complete and ends without one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specrt.engines.contract import UNDRAFTED
from specrt.engines.errors import BackendError, UsageError
from specrt.engines.interface import Array
from specrt.runtime.sampling.masks import Mask, MaskedRows
from specrt.runtime.structured import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 32  # grammars that a runtime keeps
# Sets of tokens whose masks are computed together where a grammar allows all of a set: white space, and texts within a
# JSON string by length, and words. With more lengths than llguidance's own, masks near a maxLength take a tenth of the
# time; with words, those within a `pattern` a third or less.
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRING}{{1,{n}}}" for n in (5, 10, 15, 20, 30)), f"{_IN_STRING}+"]
_SLICES += ["[a-z]+", "[A-Za-z0-9]+"]
_QUOTED_SOURCE = re.compile(r"\n +\d+ \| .*|\n +\^.*|<non-verbose/>|<backtrace>(?s:.*)")
_POSITION = re.compile(r"^(at )?\d+\(\d+\): ")


class Vocabulary:
    """A tokenizer for llguidance: the bytes of each id, empty for ids without text, and one more id for the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, token_bytes: Callable[[int], bytes], special_ids: Collection[int], vocab_size: int) -> None:
        self.tokens = [*map(token_bytes, range(vocab_size)), b"<end>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = [*special_ids, vocab_size]
        # What only masks decide: ids without text, and special ones
        self.unusual_ids = frozenset(self.special_token_ids).union(i for i, data in enumerate(self.tokens) if not data)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenizes no text, so that masks are not restricted to canonical tokens."""
        return []


class Grammars:
    """The grammars of a runtime, compiled once each. May be used from several threads.

    ``make_vocabulary`` is called when the first grammar is needed. Raises ``BackendError`` without llguidance.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], eos_token_ids: Sequence[int]) -> None:
        self._make_vocabulary, self._eos_token_ids = make_vocabulary, tuple(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._vocab_size, self._unusual_ids = 0, frozenset[int]()
        self._compiled: dict[Grammar, LLMatcher] = {}
        self._lock = threading.Lock()

    def compiled(self, grammar: Grammar) -> LLMatcher:
        """The matcher at the start of a text. Raises ``UsageError`` for an invalid or unsupported grammar."""
        with self._lock:
            found = self._compiled.pop(grammar, None) or self._compile(grammar)
            self._compiled[grammar] = found  # moved to the end: the newest is last
            if len(self._compiled) > MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
            return found

    def constraint(
        self, grammar: Grammar, ending_ids: Collection[int], num_prompt_tokens: int, best_only: bool = False
    ) -> Constraint:
        """The constraint of one generation, which ends at any of ``ending_ids``. ``best_only``: see ``Constraint``."""
        matcher = self.compiled(grammar)
        ends = [token for token in self._eos_token_ids if token in ending_ids]
        unusual = self._unusual_ids.union(ends)
        return Constraint(
            grammar.option, matcher, self._vocab_size, ends, ending_ids, num_prompt_tokens, unusual, best_only
        )

    def _compile(self, grammar: Grammar) -> LLMatcher:
        llguidance = _llguidance(grammar.option)
        if self._tokenizer is None:
            vocabulary = self._make_vocabulary()
            self._vocab_size, self._unusual_ids = vocabulary.eos_token_id, vocabulary.unusual_ids
            self._tokenizer = llguidance.LLTokenizer(vocabulary, n_vocab=len(vocabulary.tokens), slices=_SLICES)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = llguidance.LLMatcher(self._tokenizer, grammar.lark, log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(f"{grammar.option}: {_reason(matcher)}; see docs/structured.md for what is supported")
        first = Constraint(grammar.option, matcher, self._vocab_size, (), (), 0, self._unusual_ids)
        if first.is_complete(()):
            raise UsageError(f"{grammar.option}: allows only the empty text, expected at least one token")
        return matcher


class Constraint:
    """The state of a grammar in one generation. The first ``num_prompt_tokens`` tokens are ignored.

    Prefixes must be allowed by the grammar. They may come in any order, but ``committed`` only grows.
    ``eos_token_ids`` are allowed where the text may end. One of ``ending_ids`` ends it.

    Whether one id may follow needs no mask, except for ``unusual_ids``. With ``best_only``, for greedy decoding, rows
    whose largest logit is that of an allowed id need none either, and are not changed.
    """

    def __init__(
        self,
        name: str,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        ending_ids: Collection[int],
        num_prompt_tokens: int,
        unusual_ids: Collection[int],
        best_only: bool = False,
    ) -> None:
        self.name = name
        self._unusual_ids, self._best_only = unusual_ids, best_only
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._vocab_size, self._eos_token_ids, self._ending_ids = vocab_size, list(eos_token_ids), frozenset(ending_ids)
        self._num_prompt_tokens = num_prompt_tokens
        self._consumed: list[int] = []
        self._num_committed = 0  # committed tokens among the consumed ones
        self._masks: dict[int, Mask] = {}  # by the number of tokens before
        self._rows = MaskedRows()
        self.failure = ""  # why the last mask without an id has none

    def mask(self, committed: Sequence[int], ahead: Sequence[int] = ()) -> Mask:
        """The ids that may follow ``committed`` and ``ahead``. It allows none if no token continues the text."""
        self._seek(committed, ahead)
        position = len(self._consumed)
        if position not in self._masks:
            self._masks[position] = self._computed()
        return self._masks[position]

    def is_complete(self, committed: Sequence[int], ahead: Sequence[int] = ()) -> bool:
        """Whether the text has ended, by an ending id or because only the end may follow."""
        if self._is_ended(committed, ahead):
            return True
        self._seek(committed, ahead)
        return self._matcher.is_accepting() and self.mask(committed, ahead).is_end

    def allows(self, token: int, committed: Sequence[int], ahead: Sequence[int] = ()) -> bool:
        """Whether ``token`` may follow ``committed`` and ``ahead``."""
        if token >= self._vocab_size:
            return False  # of a draft with more ids
        if token in self._unusual_ids:
            return self.mask(committed, ahead).allows(token)
        self._seek(committed, ahead)
        return self._matcher.validate_tokens([token]) == 1

    def forced(self, committed: Sequence[int], ahead: Sequence[int] = ()) -> int | None:
        """The id that must follow; None if several may follow, or none."""
        return None if self.is_complete(committed, ahead) else self.mask(committed, ahead).only

    def extended(self, committed: Sequence[int], drafted: Sequence[int], k: int) -> list[int]:
        """``drafted`` up to the first forbidden id, then the forced ids: at most ``k`` ids.

        Exact for drafts that are not sampled, since the removed ids have probability 0 in p.
        """
        kept: list[int] = []
        for token in drafted[:k]:
            if self.is_complete(committed, kept) or not self.allows(token, committed, kept):
                break
            kept.append(token)
        while len(kept) < k and (forced := self.forced(committed, kept)) is not None:
            kept.append(forced)
        return kept

    def apply(self, logits: Array, committed: Sequence[int], ahead: Sequence[int], drafted: Sequence[int]) -> int:
        """Mask rows [R, V] f32. The first follows ``committed`` and ``ahead``, each next one a drafted id more.

        Rows that cannot be reached are not changed. Returns the number of rows before the first in which no id is
        allowed, which is not changed either.
        """
        prefix = list(ahead)
        for row in range(len(logits)):
            if self.is_complete(committed, prefix):
                break
            is_fine = self._best_only and self._allows_best(logits[row], committed, prefix)
            if not is_fine and not self._rows.apply(self.mask(committed, prefix), logits[row]):
                return row
            if row >= len(drafted) or not self.allows(drafted[row], committed, prefix):
                break
            prefix.append(drafted[row])
        return len(logits)

    def _allows_best(self, logits: Array, committed: Sequence[int], ahead: Sequence[int]) -> bool:
        """Whether the first id with the largest logit, which the model may choose, may follow: then a mask keeps it."""
        best = int(logits.argmax())
        return bool(UNDRAFTED < logits[best] < np.inf) and self.allows(best, committed, ahead)

    def _is_ended(self, committed: Sequence[int], ahead: Sequence[int]) -> bool:
        if ahead:
            return ahead[-1] in self._ending_ids
        return len(committed) > self._num_prompt_tokens and committed[-1] in self._ending_ids

    def _computed(self) -> Mask:
        words = np.zeros(self._vocab_size // 32 + 1, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():  # a dead end, from which a matcher does not come back
            reason = _reason(self._matcher)
            self.failure = "the tokenizer has no token for what comes next" if reason == "NoExtensionBias" else reason
            self._matcher, self._consumed, self._num_committed = self._fresh.deep_copy(), [], 0
            words[:] = 0
        return Mask(words.view(np.uint8), self._vocab_size, self._eos_token_ids)

    def _seek(self, committed: Sequence[int], ahead: Sequence[int]) -> None:
        """Move the matcher to the end of ``ahead``, forward or back."""
        known = self._num_committed
        wanted = [*committed[self._num_prompt_tokens + known :], *ahead]
        beyond = self._consumed[known:]
        same = next((i for i, pair in enumerate(zip(beyond, wanted, strict=False)) if pair[0] != pair[1]), None)
        num_same = min(len(beyond), len(wanted)) if same is None else same
        if num_back := len(beyond) - num_same:
            self._matcher.rollback(num_back)
            del self._consumed[known + num_same :]
        for token in wanted[num_same:]:
            if self._matcher.try_consume_tokens([token]) != 1:
                raise ValueError(f"{self.name}: got a prefix with id {token}, which the grammar forbids")
            self._consumed.append(token)
        self._num_committed = len(committed) - self._num_prompt_tokens
        # Keep masks for one round only: later, committed prefixes are not needed again, and rejected ones are wrong.
        least, most = self._num_committed, known + num_same
        self._masks = {at: mask for at, mask in self._masks.items() if least <= at <= most}


def _reason(matcher: LLMatcher) -> str:
    """llguidance's message in one line, without its quotation of the grammar."""
    text = _POSITION.sub("", _QUOTED_SOURCE.sub("", matcher.get_error()))
    text = text.removeprefix("failed to compile JSON schema: ")
    for keyword, begin in (("pattern", "regex parse error"), ("$ref", "Pointer "), ("$ref", "Resource ")):
        if text.startswith(begin):
            text = f"{keyword}: {text}"
    return " ".join(text.split())


def _llguidance(option: str) -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise BackendError(
            f"{option}: needs llguidance, which is not installed; install it with pip install 'specrt[grammar]'"
        ) from error
    return llguidance
