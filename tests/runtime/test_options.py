"""The options' ranges, and what is refused, each in one line."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import numpy as np
import pytest

from specrt.engines.errors import UsageError
from specrt.runtime.options import OPTIONS, GenerationOptions, Options, checked, neutral
from specrt.runtime.settings import Settings
from tests.runtime.support.bundles import VOCAB_SIZE
from tests.runtime.test_settings import refused, resolved

NUMBERS: list[tuple[str, list[float], list[Any]]] = [
    ("max_new_tokens", [0, 1, 10**9], [-1, 1.0, 2.5, None, "8", True]),
    ("min_new_tokens", [0, 1, 256], [-1, 257, 1.0, None, True]),
    ("num_speculative_tokens", [0, 1, 4], [-1, 5, 2.0, "2", True]),
    ("temperature", [0, 1e-9, 0.5, 1, 100, 100.0], [-1e-9, 100.5, math.nan, math.inf, "1", True]),
    ("top_k", [0, 1, 1024], [-1, 1025, 5.0, True]),
    ("top_p", [0, 0.5, 1, 1.0], [-0.1, 1.1, math.nan, "0.9", True]),
    ("min_p", [0, 0.5, 1], [-0.1, 1.1, math.nan, True]),
    ("seed", [0, 2**64 - 1], [-1, 2**64, 1.0, True]),
    ("repetition_penalty", [1e-3, 1, 100], [0, -1, 100.5, math.nan]),
    ("presence_penalty", [-100, 0, 100], [-100.5, 100.5, math.nan, "0"]),
    ("frequency_penalty", [-100, 0, 100], [-100.5, 100.5, math.nan, True]),
    ("logprobs", [0, 20], [-1, 21, 1.0, True]),
]


@pytest.mark.parametrize(("name", "good", "bad"), NUMBERS, ids=[name for name, _, _ in NUMBERS])
def test_numbers_have_ranges(name: str, good: list[float], bad: list[Any]) -> None:
    for value in good:
        resolved({name: value})
    for value in bad:
        assert refused({name: value}).startswith(f"{name}: got {value!r}, ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "typical"}, "rule: got 'typical', expected one of match, block"),
        ({"draft": "self"}, "draft: got 'self', expected one of auto, ngram, model, none"),
        ({"temprature": 1}, "temprature: not an option of a generation; expected some of add_generation_prompt, "),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: got 9, expected at most max_new_tokens (8)"),
        ({"repetition_penalty": 0}, "repetition_penalty: got 0, expected more than 0; 1 is neutral"),
        ({"logit_bias": {3: math.inf}}, "logit_bias: got inf, expected a number from -10000.0 to 10000.0"),
        ({"logit_bias": {3: -10001}}, "logit_bias: got -10001, expected a number"),
        ({"logit_bias": {3: "1"}}, "logit_bias: got '1', expected a number"),
        ({"logit_bias": {3: None}}, "logit_bias: got None, expected a number"),
        ({"logits_processors": [3]}, "logits_processors: got 3, expected callables (token_ids, logits)"),
        ({"stop": ["a", ""]}, "stop: string 1 is empty"),
        ({"banned_token_ids": 5}, "banned_token_ids: got "),
        ({"stop_token_ids": 5}, "stop_token_ids: got "),
        ({"stop_token_ids": [[5]]}, "stop_token_ids: got [5], expected ids in 0.."),
        ({"seed": "x" * 10**6}, "seed: got 'xxxxxxxxxxxx...xxxxxxxxxxxxx', expected a whole number"),
        ({"logit_bias": [3]}, "logit_bias: got "),
        ({"logits_processors": len}, "logits_processors: got "),
    ],
)
def test_errors_name_the_expected_value(options: dict[str, Any], message: str) -> None:
    assert refused(options).startswith(message)


@pytest.mark.parametrize("name", ["banned_token_ids", "stop_token_ids", "logits_processors"])
def test_what_can_be_read_only_once_is_used_or_refused(name: str) -> None:
    """A check that exhausts an iterator must not leave nothing of it."""
    item = len if name == "logits_processors" else 5
    try:
        settings = resolved({name: iter([item])})
    except UsageError:
        return
    assert tuple(getattr(settings, "ending_ids" if name == "stop_token_ids" else name)) == (item,)


@pytest.mark.parametrize("name", ["logit_bias", "banned_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**9, True, 3.0, "3", None])
def test_ids_outside_the_vocabulary_are_refused(name: str, token: Any) -> None:
    ids = {2: 1.0, token: 1.0} if name == "logit_bias" else [2, token]
    assert refused({name: ids}) == f"{name}: got {token!r}, expected ids in 0..{VOCAB_SIZE - 1}"
    resolved({name: {0: 1.0, VOCAB_SIZE - 1: -1.0} if name == "logit_bias" else [0, VOCAB_SIZE - 1]})


@pytest.mark.parametrize("name", ["ignore_eos", "model_defaults", "reproducible"])
def test_flags_are_true_or_false(name: str) -> None:
    for value in (True, np.False_):
        resolved({name: value})
    wrong: Any
    for wrong in (1, "yes", []):
        assert refused({name: wrong}) == f"{name}: got {wrong!r}, expected True or False"


def test_the_keyword_arguments_have_the_options_names_and_types() -> None:
    assert get_type_hints(Options) == get_type_hints(GenerationOptions)
    assert list(Options.__annotations__) == list(OPTIONS)


def test_an_option_is_checked_by_its_name() -> None:
    assert checked("stop", "x") == ("x",)
    assert checked("top_k", np.int64(5)) == 5
    assert checked("tools", [{"name": "f"}]) == [{"name": "f"}]
    for name, wrong in (("temperature", "hot"), ("tools", 5), ("stop", [""]), ("logprobs", 21), ("rule", "best")):
        with pytest.raises(UsageError, match=rf"^{name}: "):
            checked(name, wrong)
    with pytest.raises(
        UsageError, match=r"^top: not an option of a generation; expected some of add_generation_prompt"
    ):
        checked("top", 1)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_default_is_an_allowed_value(name: str) -> None:
    """And what is neutral, too."""
    assert checked(name, OPTIONS[name].default) == OPTIONS[name].default
    if OPTIONS[name].neutral is not None:
        assert checked(name, neutral(name)) == neutral(name) == getattr(Settings(), name)
