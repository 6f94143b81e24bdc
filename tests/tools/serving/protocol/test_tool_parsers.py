"""Tool calls in a text that comes in any pieces: eight public bugs are parsers that assume one token a piece."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.serving.protocol.tool_parsers import (
    FORMATS,
    CallArguments,
    CallBegin,
    CallEnd,
    ToolParser,
    format_of_template,
)
from tests.tools.serving.protocol.calls import Call, joined

NAMES = {"f", "get_weather"}


F, G = Call("f", "{}"), Call("get_weather", '{"city": "Ulm \\" }"}')
JSON_F, JSON_G = '{"name": "f", "arguments": {}}', '{"name": "get_weather", "arguments": {"city": "Ulm \\" }"}}'
TRICKY = Call("f", '{"a": "<tool_call>}</tool_call>"}')
JSON_TRICKY = '{"name": "f", "arguments": {"a": "<tool_call>}</tool_call>"}}'
OTHER = '{"name": "other", "arguments": {}}'

CASES: list[tuple[str, str, list[str | Call]]] = [
    ("hermes", "just text <b> \n", ["just text <b> \n"]),
    ("hermes", f"Let me see.\n<tool_call>\n{JSON_G}\n</tool_call>", ["Let me see.", G]),
    ("hermes", f"<tool_call>{JSON_F}</tool_call>\n<tool_call>{JSON_G}</tool_call>\n", [F, G]),
    ("hermes", f"<tool_call>{JSON_TRICKY}</tool_call> done", [TRICKY, "done"]),
    ("hermes", f"<tool_call>{JSON_F}", [F]),  # the end of the text is the end of the call
    ("hermes", f"<tool_call>{OTHER}</tool_call>", [f"<tool_call>{OTHER}</tool_call>"]),
    ("hermes", f"a <tool_call> b <tool_call>{JSON_F}</tool_call>", ["a <tool_call> b", F]),
    ("hermes", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ("hermes", '<tool_call>{"name": ["f"]}</tool_call>', ['<tool_call>{"name": ["f"]}</tool_call>']),
    ("hermes", "1 < 2 and <tool_", ["1 < 2 and <tool_"]),
    ("mistral", f"[TOOL_CALLS][{JSON_F}, {JSON_G}]", [F, G]),
    (
        "mistral",
        'Sure. [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{"city": "Ulm \\" }"}',
        ["Sure.", F, G],
    ),
    ("mistral", "[TOOL_CALLS]hello [x", ["[TOOL_CALLS]hello [x"]),
    ("mistral", "[TOOL_CALLS] f {} and more", [F, "and more"]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', [F, F]),
    ("llama3_json", '{"name": "f", "parameters": {}}\n', [F]),
    ("llama3_json", f"{JSON_F} is a call", [F, "is a call"]),
    ("llama3_json", f"see {JSON_F}", [f"see {JSON_F}"]),
    ("llama3_json", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("json", f"```json\n[{JSON_F}, {JSON_G}]\n```", [F, G]),
    ("json", JSON_G, [G]),
    ("json", '{"a": [1, 2]} tail', ['{"a": [1, 2]} tail']),
    ("json", '{"a": ', ['{"a": ']),
    ("json", "``` x", ["``` x"]),
    ("json", "  ", ["  "]),
    # arguments before the name, as JSON in a string, absent, and members after them
    ("hermes", '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', [Call("f", '{"a": [1]}')]),
    ("json", '{"name": "f", "arguments": "{\\"a\\": 1}"}', [Call("f", '{"a": 1}')]),
    ("json", '{"name": "f"}', [F]),
    ("json", '{"id": 7, "name": "f", "arguments": {}, "more": {"a": "}"}} done', [F, "done"]),
    ("hermes", f"<tool_call>[{JSON_F} , {JSON_G}] </tool_call>.", [F, G, "."]),
    # malformed ends: what has begun stays a call, and the rest is content
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', [Call("f", '{"a": [1, ', False)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call> and more', [F, "and more"]),
    ("hermes", f"<tool_call>{JSON_F} and more", [F, "and more"]),
    ("hermes", f"<tool_call>{JSON_F}</tool_", [F]),
    ("mistral", f"[TOOL_CALLS][{JSON_F}, {OTHER}]", [F, f"{OTHER}]"]),
    ("mistral", f"[TOOL_CALLS][{JSON_F}, 7]", [F, "7]"]),
    ("mistral", f"[TOOL_CALLS][{JSON_F}, ", [F]),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}", ["[TOOL_CALLS]other[ARGS]{}"]),
    ("mistral", "[TOOL_CALLS][", ["[TOOL_CALLS]["]),
    ("llama3_json", f"{JSON_F}; {OTHER}", [F, OTHER]),
    ("json", f"[{OTHER}, {JSON_F}]", [f"[{OTHER}, {JSON_F}]"]),
    ("json", '{"name": "f", "arguments": {"a": nonsense}}', [Call("f", '{"a": nonsense}')]),
]


def deltas_of(form: str, pieces: list[str]) -> list[str | Call]:
    """What the parser reports, joined."""
    parser = ToolParser(FORMATS[form], NAMES)
    return joined([event for piece in pieces for event in parser.push(piece)] + parser.finish())


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_every_text_whole_by_characters_and_in_two_pieces(form: str, text: str, expected: list[str | Call]) -> None:
    assert deltas_of(form, [text]) == expected
    assert deltas_of(form, list(text)) == expected
    for cut in range(len(text)):
        assert deltas_of(form, [text[:cut], text[cut:]]) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=12))
def test_every_split_gives_the_same_deltas(case: tuple[str, str, list[str | Call]], cuts: list[int]) -> None:
    form, text, expected = case
    ends = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert deltas_of(form, [text[start:end] for start, end in pairwise(ends)]) == expected


@given(
    st.sampled_from(sorted(FORMATS)), st.text(alphabet='<tool_ca>/[]TOLCS{}"\\:; nf', max_size=40), st.integers(1, 5)
)
def test_text_of_marks_and_braces_never_depends_on_the_pieces(form: str, text: str, size: int) -> None:
    whole = deltas_of(form, [text])
    assert deltas_of(form, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    if not any(isinstance(delta, Call) for delta in whole):
        assert "".join(map(str, whole)) == text  # nothing is lost


def test_a_parser_that_looks_at_pieces_would_fail_here() -> None:
    """The negative control: a mark found only where it is one piece."""
    form, text, expected = CASES[1]

    def naive(pieces: list[str]) -> bool:
        return any("<tool_call>" in piece for piece in pieces)

    assert naive([text]) and not naive(list(text))
    assert deltas_of(form, list(text)) == expected


def test_content_is_not_held_longer_than_needed() -> None:
    parser = ToolParser(FORMATS["hermes"], NAMES)
    assert parser.push("some words") == ["some words"]
    assert parser.push(" and <to") == [" and"]
    assert parser.push("y>") == [" <toy>"]
    parser = ToolParser(FORMATS["json"], NAMES)
    assert parser.push("I think") == ["I think"]


@pytest.mark.parametrize(
    ("form", "head", "tail"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": ', "}]"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", ""),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": ', "}"),
        ("json", '[{"name": "f", "arguments": ', "}]"),
    ],
)
def test_arguments_are_reported_as_they_come(form: str, head: str, tail: str) -> None:
    parser, arguments = ToolParser(FORMATS[form], NAMES), '{"city": "Ulm", "days": [1, 2]}'
    assert parser.push(head) == []
    assert parser.push(arguments[0]) == [CallBegin("f"), CallArguments("{")]
    for char in arguments[1:-1]:
        assert parser.push(char) == [CallArguments(char)]
    assert parser.push(arguments[-1] + tail) == [CallArguments("}"), CallEnd()]
    assert parser.finish() == []


def test_a_long_text_that_never_calls_takes_linear_time() -> None:
    parser, piece = ToolParser(FORMATS["json"], NAMES), "words and more of them, "
    started = time.process_time()
    parser.push('{"arguments": {"a": "')
    events = [event for _ in range(20_000) for event in parser.push(piece)] + parser.finish()
    assert joined(events) == ['{"arguments": {"a": "' + 20_000 * piece]
    assert time.process_time() - started < 5


def test_the_format_of_a_template() -> None:
    assert format_of_template("... <tool_call> ...") == "hermes"
    assert format_of_template("[TOOL_CALLS]") == "mistral"
    assert format_of_template("<|start_header_id|> ... <|python_tag|>") == "llama3_json"
    assert format_of_template('<|start_header_id|> {"name": , "parameters": }') == "llama3_json"
    assert format_of_template("{{ tools | tojson }}") == "json"
