"""Where and why a completion ends: ids, lengths and stop strings, alone and at the same token."""

from __future__ import annotations

import pytest

from specrt.runtime.completion import Completion
from specrt.runtime.settings import Settings
from specrt.runtime.text.detokenizer import Stage, TextStream
from specrt.runtime.text.stops import StopWatch

PROMPT, EOS = [7, 8, 9], 0


class LateStage(Stage):
    """Each token's text is final when the next token comes, or the end."""

    def __init__(self) -> None:
        self._held: tuple[str, ...] = ()

    def push(self, token: str) -> tuple[str, ...]:
        done, self._held = self._held, (token,)
        return done

    def close(self) -> tuple[str, ...]:
        return self._held


def completion(
    stop: str = "", max_new_tokens: int = 6, max_seq_len: int = 99, stage: Stage | None = None, min_new_tokens: int = 0
) -> Completion:
    """Token 1 is the text ``a``, 2 ``b`` and so on; ``EOS`` has the text ``@``."""
    settings = Settings(max_new_tokens, ending_ids=(EOS,), min_new_tokens=min_new_tokens)
    text = StopWatch(TextStream(lambda token: chr(ord("`") + token) if token else "@", [stage or Stage()]), stop or ())
    return Completion(PROMPT, settings, max_seq_len, text)


@pytest.mark.parametrize(
    ("given", "ids", "emitted", "reason", "stop"),
    [
        ({}, [1, 2, 3], 3, None, None),
        ({}, [1, EOS, 3], 2, "stop", EOS),
        ({}, [1, 2, 3, 4, 5, 6, 1], 6, "length", None),
        ({}, [1, 2, 3, 4, 5, EOS], 6, "stop", EOS),
        ({"max_seq_len": 5}, [1, 2, 3], 2, "length", None),
        ({"stop": "bc"}, [1, 2, 3, 4], 3, "stop", "bc"),
        ({"stop": "b@"}, [1, 2, EOS, 4], 3, "stop", "b@"),  # of an ending id too
        ({"stop": "f"}, [1, 2, 3, 4, 5, 6], 6, "stop", "f"),  # of the last token wanted too
        ({"stop": "b", "min_new_tokens": 3}, [1, 2, 2, 4], 3, "stop", "b"),
        ({"stop": "bc", "stage": LateStage()}, [1, 2, 3, 4, 5], 4, "stop", "bc"),
        ({"stop": "ef", "stage": LateStage()}, [1, 2, 3, 4, 5, 6], 6, "stop", "ef"),  # only the end makes it final
        ({"stop": "b@", "stage": LateStage()}, [1, 2, EOS, 4], 3, "stop", "b@"),
    ],
)
def test_it_ends_at_the_first_token_that_is_a_reason(
    given: dict[str, str | int | Stage], ids: list[int], emitted: int, reason: str | None, stop: int | str | None
) -> None:
    done = completion(**given)  # type: ignore[arg-type]
    assert done.commit(ids) == done.new_tokens == ids[:emitted]
    assert done.tokens == PROMPT + ids[:emitted]
    assert (done.finish_reason, done.stop) == (reason, stop)
    assert done.num_left == (6 - emitted if reason is None else 0)


def test_commits_go_on_where_the_last_one_ended() -> None:
    done = completion(stop="bc")
    assert (done.commit([1, 2]), done.finish_reason, done.num_left) == ([1, 2], None, 4)
    assert (done.commit([3, 4]), done.stop, done.num_left) == ([3], "bc", 0)


@pytest.mark.parametrize("limits", [{"max_new_tokens": 0}, {"max_seq_len": 3}])
def test_where_no_token_may_come_it_has_ended_at_once(limits: dict[str, int]) -> None:
    done = completion(**limits)  # type: ignore[arg-type]
    assert (done.finish_reason, done.num_left, done.new_tokens) == ("length", 0, [])


def test_without_a_text_only_ids_and_lengths_count() -> None:
    done = Completion(PROMPT, Settings(2, ending_ids=(EOS,)), 99)
    assert (done.commit([1, 2, 3]), done.finish_reason) == ([1, 2], "length")
