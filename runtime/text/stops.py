"""Stop strings: the text of one output, cut where the first of them begins, however the text came in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.engines.errors import UsageError
from specrt.runtime.text.detokenizer import TextStream

STOP_KINDS = "a string or a list of strings"


def checked_stops(stops: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings in a tuple; a string alone is one of them. Raises ``UsageError`` for all else and empty ones."""
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

    First is the one whose end comes first, of those that end at one place the longest; it and all after it are not in
    the text. The end of the text is held back while a stop string may begin there. Raises ``UsageError`` as
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

        Without ``may_stop`` no stop string counts whose last character this token makes final. One that counts may
        begin in such text. Raises ``ValueError`` after a match and after ``end``.
        """
        if self._ended:
            raise ValueError("the text has ended, it takes no more tokens; make a new StopWatch for another output")
        self._may_stop = may_stop
        return self._advance(self._stream.push(token_id))

    def take(self) -> str:
        """The text that is final, cannot be part of a stop string any more, and was not taken before."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def end(self) -> None:
        """No more tokens come: all text is final. After a match, nothing more is read from the stream.

        A stop string may be completed here and then is ``matched``, unless the last token was one without ``may_stop``.
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
    """A state of the automaton of Aho and Corasick (1975): the longest end of the text that begins a stop string."""

    def __init__(self, num_chars: int = 0) -> None:
        self.longer: dict[str, _Prefix] = {}  # by the next character
        self.shorter: _Prefix | None = None  # the next longest end of the text that begins a stop string
        self.stop: str | None = None  # the longest stop string that ends here
        self.num_held = num_chars  # of the longest end that begins a stop string and is not all of it

    def then(self, char: str) -> _Prefix:
        """The state after another character. Walks back no further than the states before went forward."""
        prefix = self
        while char not in prefix.longer:
            if prefix.shorter is None:
                return prefix
            prefix = prefix.shorter
        return prefix.longer[char]


def _automaton(stops: Sequence[str]) -> _Prefix:
    """The state for empty text, from which all others are reached."""
    root = _Prefix()
    for stop in stops:
        prefix = root
        for num_chars, char in enumerate(stop, 1):
            prefix = prefix.longer.setdefault(char, _Prefix(num_chars))
        prefix.stop = stop
    states = [root]
    for state in states:  # grows: the shorter ones come first
        for char, prefix in state.longer.items():
            prefix.shorter = shorter = root if state.shorter is None else state.shorter.then(char)
            prefix.stop = prefix.stop or shorter.stop
            prefix.num_held = prefix.num_held if prefix.longer else shorter.num_held
        states += state.longer.values()
    return root
