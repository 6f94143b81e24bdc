"""Structured texts of a random tiny model, through the whole runtime: valid, and the same for every draft and K."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt.engines.errors import UsageError
from specrt.runtime.runtime import Runtime
from specrt.runtime.structured import grammar_of, json_rule
from specrt.runtime.text.tool_calls import strict_tool_grammar, tool_call_grammar
from specrt.serving.protocol.tool_parsers import FORMATS
from tests.runtime.sampling.grammars import grammars_of
from tests.runtime.support.bundles import Open
from tests.tools.serving.protocol.calls import parsed

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "colors": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "colors"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DRAFTS: list[dict[str, Any]] = [
    *({"draft": draft, "num_speculative_tokens": k} for draft in ("ngram", "model") for k in (1, 2, 4)),
    {"draft": "auto"},
]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {40: 2.0}, "logprobs": 2},
    {"temperature": 1.0, "seed": 5, "min_new_tokens": 60, "stop": ["no such text"]},
]


@pytest.fixture(scope="module")
def tiny(tiny_bundle: Path) -> Iterator[Runtime]:
    with specrt.load(tiny_bundle, threads=1) as runtime:
        yield runtime


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "size", "colors"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 4
    assert value["size"] in range(100)
    assert 1 <= len(value["colors"]) <= 2 and set(value["colors"]) <= {"red", "green"}


@pytest.mark.parametrize("sampling", SAMPLING, ids=["greedy", "seed", "penalties", "min_new_tokens"])
def test_json_of_a_schema_with_every_draft_and_k(tiny: Runtime, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"json_schema": SCHEMA, "max_new_tokens": 120, "reproducible": True, **sampling}
    plain = tiny.generate("Hello", draft="none", **options)
    check(plain.text)
    assert (plain.finish_reason, plain.stop) == ("stop", None)
    num_drafted = 0
    for drafting in DRAFTS:
        done = tiny.generate("Hello", **drafting, **options)
        assert (done.token_ids, done.finish_reason) == (plain.token_ids, "stop")
        num_drafted += done.stats.accepted
    assert num_drafted > 40


@pytest.mark.parametrize("k", [1, 4])
def test_json_of_a_schema_by_block(tiny: Runtime, k: int) -> None:
    for seed in range(4):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "rule": "block", "num_speculative_tokens": k}
        done = tiny.generate("Hello", json_schema=json.dumps(SCHEMA), max_new_tokens=120, **options)
        check(done.text)
        assert done.settings.rule == "block" and done.stats.accepted > 5


def test_a_regex_a_lark_grammar_and_a_json_object(tiny: Runtime) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_new_tokens": 60}
    assert re.fullmatch("[a-f]{3}/[0-9]{2,5}", tiny.generate("Hello", regex="[a-f]{3}/[0-9]{2,5}", **options).text)
    lark = 'start: "x"~2 end\nend: "yes" | "no"\n'
    assert tiny.generate("Hello", grammar=lark, **options).text in ("xxyes", "xxno")
    begun = tiny.generate("Hello", json_object=True, **{**options, "max_new_tokens": 5})
    assert begun.text.startswith("{") and begun.finish_reason == "length"


def test_text_that_may_end_ends_by_eos_and_without_one_goes_on(tiny: Runtime) -> None:
    options: dict[str, Any] = {
        "temperature": 1.0,
        "regex": "[ab]{1,9}",
        "logit_bias": {tiny.manifest.eos_token_ids[0]: 30},
    }
    done = tiny.generate("Hello", seed=1, **options)
    assert done.stop == tiny.manifest.eos_token_ids[0] and len(done.text) == 1
    longest = tiny.generate("Hello", seed=1, ignore_eos=True, **options)
    assert (len(longest.text), longest.finish_reason, longest.stop) == (9, "stop", None)


def test_a_complete_text_at_the_last_token_has_stopped(tiny: Runtime) -> None:
    done = tiny.generate("Hello", regex="[0-9]", max_new_tokens=1)
    assert (len(done.text), done.finish_reason) == (1, "stop")


def test_bans_that_leave_no_id_are_an_error_that_names_the_option(tiny: Runtime) -> None:
    (a,) = tiny.codec.ids_of_text("a", add_special_tokens=False)
    for drafting in ({"draft": "none"}, {"draft": "model"}, {"draft": "ngram"}):
        with pytest.raises(UsageError, match=r"^regex: no id is left after \d+ tokens"):
            tiny.generate("Hello", regex="xa", banned_token_ids=[a], **drafting)  # type: ignore[arg-type]
    assert tiny.generate("Hello", regex="xa", draft="model").text == "xa"


def test_processors_and_a_grammar_hold_together(tiny: Runtime) -> None:
    """A processor sees only prefixes that the grammar allows too."""
    seen: list[str] = []

    def processor(ids: Any, logits: Any) -> None:
        seen.append(tiny.codec.decode(ids[num_prompt:]))
        logits[::2] = logits[::2] - 1

    num_prompt = len(tiny.codec.encode("Hello"))
    options: dict[str, Any] = {
        "regex": "([ab][cd]){6}",
        "logits_processors": [processor],
        "temperature": 1.0,
        "seed": 2,
    }
    plain = tiny.generate("Hello", draft="none", **options).token_ids
    for drafting in DRAFTS:
        assert tiny.generate("Hello", **drafting, **options).token_ids == plain
    assert all(re.fullmatch("([ab][cd])*[ab]?", text) for text in seen) and len(seen) > 50


def test_a_failure_in_a_round_leaves_later_texts_right(tiny: Runtime) -> None:
    calls: list[int] = []

    def fails(ids: Any, logits: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise OSError("gone")

    options: dict[str, Any] = {"json_schema": SCHEMA, "draft": "model", "num_speculative_tokens": 4}
    expected = tiny.generate("Hello", **options).token_ids
    with pytest.raises(OSError, match="gone"):
        tiny.generate("Hello", logits_processors=[fails], **options)
    assert tiny.generate("Hello", **options).token_ids == expected


def test_a_tokenizer_whose_texts_are_not_bytes_is_refused(open_bundle: Open) -> None:
    with pytest.raises(UsageError, match="structured output: got a tokenizer whose texts are more than the bytes"):
        open_bundle().generate([1, 2], regex="a")


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "properties": {"city": {"$ref": "#/$defs/city"}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
                "x-guidance": {"whitespace_flexible": False},
            },
        },
    }
    for name in ("get_weather", "get-time")
]


@pytest.mark.parametrize("form", FORMATS)
def test_a_tool_call_is_forced_in_every_format(tiny: Runtime, form: str) -> None:
    called = set()
    for name, seeds in ((None, range(4)), ("get-time", range(2))):
        grammar = tool_call_grammar(form, TOOLS, tiny.codec.special_tokens, name)
        for seed in seeds:
            done = tiny.generate("Hello", grammar=grammar, temperature=2.0, seed=seed, max_new_tokens=120)
            (call,) = parsed(form, done.text, ["get_weather", "get-time"])
            assert not isinstance(call, str) and call.is_complete
            assert json.loads(call.arguments) in ({"city": "Rome"}, {"city": "Oslo"})
            assert name in (None, call.name) and done.finish_reason == "stop"
            called.add(call.name)
    assert "get-time" in called


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("marks", [{}, {"[TOOL_CALLS]": 256, "[ARGS]": 257}])
def test_several_calls_are_one_or_more_and_nothing_else(form: str, marks: dict[str, int]) -> None:
    """The texts that the parser reads as one, two and three calls are allowed, and may end after each call."""
    tokens = [*(bytes([i]) for i in range(256)), b"", b""]
    lark = grammar_of(grammar=tool_call_grammar(form, TOOLS, marks, several=True))
    assert lark is not None
    grammars = grammars_of(tokens, [0], marks.values())
    ends = {"hermes": "\n", "llama3_json": "; ", "json": ", ", "mistral": "" if marks else ", "}
    for num in (1, 2, 3):
        calls = [written(form, marks, city) for city in ("Oslo", "Rome", "Oslo")[:num]]
        if form == "mistral" and not marks:
            calls = [calls[0][:-1], *(call.removeprefix("[TOOL_CALLS][")[:-1] for call in calls[1:])]
        text = ends[form].join(calls)
        text = f"[{text}]" if form == "json" and num > 1 else f"{text}]" if form == "mistral" and not marks else text
        assert len(parsed(form, text, ["get_weather", "get-time"])) == num
        constraint, committed = grammars.constraint(lark, [0], 0), list[int]()
        for part in re.split(r"(\[TOOL_CALLS\]|\[ARGS\])" if marks else "(?!)", text):
            for token in [marks[part]] if part in marks else part.encode():
                mask = constraint.mask(committed)
                assert mask.allows(token), (text, committed)
                committed.append(token)
        assert constraint.mask(committed).allows(0) or constraint.is_complete(committed), "the end"
        assert not constraint.mask(committed).allows(ord("x"))


def test_what_no_grammar_can_be_made_of_is_one_line(tiny: Runtime) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"json_schema": deep}, "json_schema: "),
        ({"json_schema": {"x-guidance": 5}}, "json_schema: x-guidance: got 5, expected an object"),
        ({"json_schema": {"const": "\ud800"}}, "json_schema: got half a surrogate pair"),
        *(({name: "a\ud800"}, f"{name}: got half a surrogate pair") for name in ("regex", "grammar")),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match="^" + re.escape(message)) as caught:
            tiny.generate("Hello", **options)
        assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(UsageError, match=r"^json_schema: got too many levels of nesting"):
        json_rule('{"items": ' * 5000 + "{}" + "}" * 5000)


def test_marks_that_are_special_tokens_are_generated_as_such() -> None:
    special = {"[TOOL_CALLS]": 5, "[ARGS]": 9, "<tool_call>": 7}
    assert tool_call_grammar("mistral", TOOLS, special, "get-time").startswith(
        'start: <[5]> call\ncall: "get-time" <[9]> args0\nargs0: %json {'
    )
    assert tool_call_grammar("hermes", TOOLS, special).startswith('start: <[7]> call\ncall: "\\n" "{')
    assert tool_call_grammar("hermes", TOOLS, special, several=True).startswith(
        'start: <[7]> call ("\\n"? <[7]> call)*'
    )
    with pytest.raises(UsageError, match="expected one of the tools' names: get_weather, get-time"):
        tool_call_grammar("json", TOOLS, {}, "nope")
    with pytest.raises(UsageError, match="expected one of hermes, mistral"):
        tool_call_grammar("xml", TOOLS, {})


@pytest.mark.parametrize("form", FORMATS)
def test_calls_of_strict_tools_follow_the_schema_and_other_text_is_free(form: str) -> None:
    """In every format, over a vocabulary of bytes and a token for each mark."""
    special = {"<tool_call>": 256, "</tool_call>": 257, "[TOOL_CALLS]": 258, "[ARGS]": 259}
    tokens = [*(bytes([i]) for i in range(256)), *(b"" for _ in special)]
    grammars = grammars_of(tokens, [], special.values())

    def follows(text: str, marks: dict[str, int]) -> bool:
        lark = grammar_of(grammar=strict_tool_grammar(form, TOOLS, marks))
        assert lark is not None
        constraint, committed = grammars.constraint(lark, [], 0), list[int]()
        for part in re.split("(" + "|".join(map(re.escape, marks)) + ")" if marks else "(?!)", text):
            for token in [marks[part]] if part in marks else part.encode():
                if not constraint.mask(committed).allows(token):
                    return False
                committed.append(token)
        return True

    for marks in ({}, special):
        right, wrong = (written(form, marks, city) for city in ("Oslo", "Ulm"))
        for text in ("Just text.", "", "a < b [1] é", right):
            assert follows(text, marks), text
        assert not follows(wrong, marks)
        if FORMATS[form].is_whole_text:
            assert not follows('{"other": 1}', marks)
        else:
            assert follows(f"Well: {right} and {right}.", marks)
            assert not follows(f"Well: {right} and {wrong}", marks)


def written(form: str, marks: dict[str, int], city: str) -> str:
    arguments = f'{{"city":"{city}"}}'
    key = "parameters" if form == "llama3_json" else "arguments"
    call = f'{{"name": "get_weather", "{key}": {arguments}}}'
    if form == "mistral":
        return f"[TOOL_CALLS]get_weather[ARGS]{arguments}" if marks else f"[TOOL_CALLS][{call}]"
    return f"<tool_call>\n{call}\n</tool_call>" if form == "hermes" else call
