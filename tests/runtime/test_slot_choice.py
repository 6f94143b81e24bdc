"""Which idle slot a prompt takes: what is read in traces of conversations, against rules that know less."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.runtime.slots import Slot, SlotPool

Request = tuple[list[int], list[int]]  # (prompt, answer)


class Tokens:
    """A cache that is only its tokens."""

    def __init__(self, can_copy: bool) -> None:
        self.tokens, self.can_copy = list[int](), can_copy

    @property
    def kv_len(self) -> int:
        return len(self.tokens)

    def reusable(self, prompt: Sequence[int], min_width: int) -> int:
        limit = min(len(self.tokens), len(prompt) - 1)
        return next((i for i in range(limit) if self.tokens[i] != prompt[i]), max(limit, 0))


class TokenSlot(Slot):
    """A slot with such a cache."""

    def __init__(self, can_copy: bool) -> None:
        super().__init__(target=self)  # type: ignore[arg-type]
        self.model = Tokens(can_copy)
        self.is_closed = False

    def copy_prefix(self, source: Any, prompt: Sequence[int], min_width: int) -> None:
        assert self.model.can_copy and source is not self
        self.model.tokens = source.model.tokens[: source.model.reusable(prompt, min_width)]

    def close(self) -> None:
        self.is_closed = True


def pool_of(num_slots: int, can_copy: bool = True, kind: type[SlotPool] = SlotPool) -> SlotPool:
    pool = kind(lambda: TokenSlot(can_copy))
    for _ in range(num_slots):
        pool.give_back(TokenSlot(can_copy))
    return pool


def ask(pool: SlotPool, prompt: list[int], answer: Sequence[int] = ()) -> int:
    """One request from beginning to end; the tokens that are read of its prompt."""
    slot = pool.take(prompt, 1)
    num_read = fill(slot, prompt, answer)
    pool.give_back(slot)
    return num_read


def fill(slot: Any, prompt: list[int], answer: Sequence[int]) -> int:
    num_kept: int = slot.model.reusable(prompt, 1)
    slot.model.tokens = [*prompt, *answer[:-1]]
    return len(prompt) - num_kept


class IdleLongest(SlotPool):
    """The slot that was idle longest, whatever it holds."""

    def _chosen(self, prompt: Sequence[int], min_width: int) -> Slot:
        return self._idle.pop(0)


class LongestPrefix(SlotPool):
    """The longest common prefix, whatever is lost."""

    def _chosen(self, prompt: Sequence[int], min_width: int) -> Slot:
        shared = [slot.target.model.reusable(prompt, min_width) for slot in self._idle]
        return self._idle.pop(shared.index(max(shared)))


class AThird(SlotPool):
    """The longest common prefix, where a third of the cache is kept or the slot was idle longest."""

    def _chosen(self, prompt: Sequence[int], min_width: int) -> Slot:
        models = [slot.target.model for slot in self._idle]
        shared = [model.reusable(prompt, min_width) for model in models]
        shared = [n if at == 0 or 3 * n >= models[at].kv_len else -1 for at, n in enumerate(shared)]
        return self._idle.pop(shared.index(max(shared)))


OTHERS = (IdleLongest, LongestPrefix, AThird)

# --- traces ---------------------------------------------------------------------------------------------------------


class Texts:
    """Random texts, no token of which occurs twice."""

    def __init__(self, seed: int) -> None:
        self.random, self._next = random.Random(seed), count()

    def text(self, low: int, high: int) -> list[int]:
        return [next(self._next) for _ in range(self.random.randint(low, high))]

    def chats(
        self, num: int, num_alive: int, system: list[int], num_turns: tuple[int, int] = (3, 10)
    ) -> Iterator[Request]:
        """Conversations of several turns, ``num_alive`` of them at a time; some speak more often than others."""
        alive: list[tuple[list[int], int]] = []
        while num or alive:
            while num and len(alive) < num_alive:
                alive.append((system, self.random.randint(*num_turns)))
                num -= 1
            at = self.random.choices(range(len(alive)), [1 / (i + 1) for i in range(len(alive))])[0]
            text, num_left = alive.pop(at)
            prompt, answer = text + self.text(20, 60), self.text(50, 200)
            yield prompt, answer
            if num_left > 1:
                alive.insert(at, (prompt + answer, num_left - 1))

    def single(self, num: int, beginnings: Sequence[list[int]]) -> Iterator[Request]:
        """Requests that nothing follows, each with one of ``beginnings``."""
        for _ in range(num):
            yield self.random.choice(beginnings) + self.text(20, 60), self.text(20, 120)

    def repeated(self, num: int) -> Iterator[Request]:
        """The same prompt, with another answer each time."""
        prompt = self.text(12, 40)
        for _ in range(num):
            yield prompt, self.text(24, 200)

    def mixed(self, *parts: tuple[int, Iterator[Request]]) -> Iterator[Request]:
        """Parts with weights, until one ends."""
        while True:
            _, part = self.random.choices(parts, [weight for weight, _ in parts])[0]
            if (found := next(part, None)) is None:
                return
            yield found


def _app_and_long_chat(t: Texts) -> Iterator[Request]:
    system = t.text(300, 300)
    return t.mixed((1, t.chats(3, 1, system, (10, 14))), (8, t.single(400, [system])))


TRACES: dict[str, Callable[[Texts], Iterator[Request]]] = {
    "chats": lambda t: t.chats(30, 3, t.text(100, 100)),
    "more chats than slots": lambda t: t.chats(30, 7, t.text(100, 100)),
    "chats with a long system prompt": lambda t: t.chats(30, 4, t.text(1000, 1000)),
    "a long chat among single requests with its system prompt": _app_and_long_chat,
    "chats and one repeated prompt": lambda t: t.mixed((2, t.chats(30, 2, t.text(100, 100))), (1, t.repeated(400))),
    "questions on documents": lambda t: t.single(150, [t.text(1500, 1500) for _ in range(3)]),
    "two applications with long prompts, and chats": lambda t: t.mixed(
        (3, t.single(300, [t.text(2000, 2000), t.text(1500, 1500)])), (1, t.chats(20, 2, t.text(100, 100)))
    ),
}


def num_read(pool: SlotPool, trace: Sequence[Request]) -> int:
    return sum(ask(pool, prompt, answer) for prompt, answer in trace)


@pytest.mark.parametrize("can_copy", [True, False])
def test_less_is_read_than_by_simpler_rules(can_copy: bool) -> None:
    """In the mean over the traces, as a multiple of the least of all rules; and no trace is as bad as their worst.

    Each rule is the best somewhere: which text goes on cannot be known.
    """
    ratios: dict[str, list[float]] = {}
    for make in TRACES.values():
        trace = list(make(Texts(0)))
        found = {kind.__name__: num_read(pool_of(4, can_copy, kind), trace) for kind in (SlotPool, *OTHERS)}
        for name, number in found.items():
            ratios.setdefault(name, []).append(number / min(found.values()))
    mine = ratios.pop("SlotPool")
    for name, others in ratios.items():
        assert sum(mine) < 0.8 * sum(others) and max(mine) < 0.6 * max(others), (name, mine, others)


# --- single choices -------------------------------------------------------------------------------------------------


def test_a_pool_opens_a_slot_only_where_none_is_idle() -> None:
    opened: list[TokenSlot] = []
    pool = SlotPool(lambda: opened.append(TokenSlot(True)) or opened[-1])  # type: ignore[func-returns-value]
    slots = [pool.take([1] * 9, 1) for _ in range(3)]
    assert slots == opened and len(opened) == 3
    for slot in slots:
        pool.give_back(slot)
    assert [pool.take([1] * 9, 1) for _ in range(3)] == opened and len(opened) == 3  # empty ones: the longest idle
    pool.give_back(opened[1])
    pool.close()
    assert [slot.is_closed for slot in opened] == [False, True, False]


HISTORIES = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 30), st.integers(0, 2)), max_size=12
)


@pytest.mark.parametrize("can_copy", [True, False])
@given(HISTORIES, st.lists(st.integers(0, 2), min_size=2, max_size=12), st.integers(1, 40))
def test_a_prompt_that_comes_again_is_not_read_again(
    can_copy: bool, history: list[tuple[list[int], int, int]], prompt: list[int], num_answer: int
) -> None:
    """Whatever was there, and however long the answer: the second time one token is read, and the answer goes too."""
    pool = pool_of(3, can_copy)
    for number, (earlier, num_tokens, token) in enumerate(history):
        ask(pool, earlier, [token] * num_tokens)
        if number % 2:
            ask(pool, prompt, [9] * num_answer)
    ask(pool, prompt, [9] * num_answer)
    assert ask(pool, prompt, [9] * num_answer) == 1
    assert ask(pool, [*prompt, *[9] * num_answer, 5], [9]) <= 2  # the newest token of the answer was never fed


@given(HISTORIES, st.lists(st.integers(0, 2), min_size=2, max_size=12))
def test_with_copies_no_slot_saves_more(history: list[tuple[list[int], int, int]], prompt: list[int]) -> None:
    pool = pool_of(3)
    for earlier, num_tokens, token in history:
        ask(pool, earlier, [token] * num_tokens)
    most = max(slot.target.model.reusable(prompt, 1) for slot in pool._idle)
    assert ask(pool, prompt) == len(prompt) - most


@pytest.mark.parametrize("can_copy", [True, False])
def test_a_text_that_does_not_go_on_loses_its_slot(can_copy: bool) -> None:
    """A long text is kept for a while, and not for ever."""
    pool, texts = pool_of(2, can_copy), Texts(0)
    ask(pool, long := texts.text(1000, 1000), texts.text(9, 9))
    is_kept = []
    for _ in range(200):
        ask(pool, texts.text(20, 20), texts.text(20, 20))
        is_kept.append(any(slot.target.model.reusable(long, 1) > 900 for slot in pool._idle))
    assert is_kept[:9] == [True] * 9 and not is_kept[-1]


def test_a_common_beginning_does_not_cost_a_long_text_its_slot() -> None:
    """With copies it costs nothing; without, it is read unless it is longer than what would be lost."""
    for can_copy, num_others, num_expected in ((True, 500, 10), (True, 5, 10), (False, 500, 110), (False, 50, 10)):
        pool, texts = pool_of(2, can_copy), Texts(0)
        system = texts.text(100, 100)
        ask(pool, system + texts.text(num_others, num_others), texts.text(9, 9))
        assert ask(pool, system + texts.text(10, 10)) == num_expected, (can_copy, num_others)
