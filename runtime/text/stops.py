"""Stop strings: the text of one output, cut where the first of them begins, for any division into tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.engines.errors import UsageError
from specrt.runtime.text.detokenizer import TextStream

STOP_KINDS = "a string or a list of strings"


def checked_stops(stops: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings as a tuple; a single string is allowed. Raises ``UsageError`` for empty ones and other types."""
    if isinstance(stops, str):
        stops = (stops,)
    if isinstance(stops, bytes | bytearray | memoryview) or not isinstance(stops, Sequence):
        raise UsageError(f"stop: got {type(stops).__name__}, expected {STOP_KINDS}; pass [] for none")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise UsageError(f"stop: item {index} is {type(stop).__name__}, expected {STOP_KINDS}; pass it as text")
        if not stop:
            raise UsageError(f"stop: string {index} is empty, expected one character at least; leave it out")
    return tuple(stops)


class StopWatch:
    """Text of one output as it becomes final, cut at the first stop string.

    The first is the one that ends first; of those that end at the same place it is the longest. The text ends before
    it. The end of the text is held back while a stop string may begin there. Raises ``UsageError`` as
    ``checked_stops`` does.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = ()) -> None:
        self.matched: str | None = None  # the stop string that was found
        self._stream = stream
        self._prefix = self._root = _automaton(checked_stops(stops))
        self._released = list[str]()
        self._held = ""
        self._may_stop, self._ended = True, False

    def push(self, token_id: int, may_stop: bool = True) -> bool:
        """Add a token; True when it completes a stop string.

        Without ``may_stop``, stop strings that end in the text made final by this token are ignored. A later match may
        still begin in it. Raises ``ValueError`` after a match and after ``end``.
        """
        if self._ended:
            raise ValueError("the text has ended, it takes no more tokens; make a new StopWatch for another output")
        self._may_stop = may_stop
        return self._advance(self._stream.push(token_id))

    def take(self) -> str:
        """The text that is final, can no longer be part of a stop string, and was not taken before."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def end(self) -> None:
        """End the text: all of it is final. After a match, nothing more is read from the stream.

        A stop string that is completed here is ``matched``, unless the last token was pushed without ``may_stop``.
        """
        if not self._ended:
            self._advance(self._stream.flush())
            self._released.append(self._held)
            self._held, self._ended = "", True

    def _advance(self, piece: str) -> bool:
        if not self._root.longer:  # no stop strings
            self._released.append(piece)
            return False
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            self._prefix = self._prefix.then(char)
            if self._may_stop and (stop := self._prefix.stop) is not None:
                self.matched, self._ended, self._held = stop, True, ""
                self._released.append(text[: end - len(stop)])
                return True
        cut = len(text) - self._prefix.num_held
        self._released.append(text[:cut])
        self._held = text[cut:]
        return False


class _Prefix:
    """A state of the Aho-Corasick automaton (1975): the longest suffix of the text that begins a stop string."""

    def __init__(self, num_chars: int = 0) -> None:
        self.longer: dict[str, _Prefix] = {}  # by the next character
        self.shorter: _Prefix | None = None  # the next longest such suffix
        self.stop: str | None = None  # the longest stop string that ends here
        self.num_held = num_chars  # length of the longest suffix that begins a stop string without completing it

    def then(self, char: str) -> _Prefix:
        """The state after another character. Its amortized cost is constant."""
        prefix = self
        while char not in prefix.longer:
            if prefix.shorter is None:
                return prefix
            prefix = prefix.shorter
        return prefix.longer[char]


def _automaton(stops: Sequence[str]) -> _Prefix:
    """The state for empty text, which leads to all others."""
    root = _Prefix()
    for stop in stops:
        prefix = root
        for num_chars, char in enumerate(stop, 1):
            prefix = prefix.longer.setdefault(char, _Prefix(num_chars))
        prefix.stop = stop
    states = [root]
    for state in states:  # grows during the loop, shorter prefixes first
        for char, prefix in state.longer.items():
            prefix.shorter = shorter = root if state.shorter is None else state.shorter.then(char)
            prefix.stop = prefix.stop or shorter.stop
            prefix.num_held = prefix.num_held if prefix.longer else shorter.num_held
        states += state.longer.values()
    return root
