"""Tool calls in a text that comes in any pieces: eight public bugs are parsers that assume one token a piece."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.serving.protocol.tool_json import ToolCall
from specrt.serving.protocol.tool_parsers import FORMATS, Delta, format_of_template, tool_parser

NAMES = {"f", "get_weather"}
F, G = ToolCall("f", "{}"), ToolCall("get_weather", '{"city": "Ulm \\" }"}')
JSON_F, JSON_G = '{"name": "f", "arguments": {}}', '{"name": "get_weather", "arguments": {"city": "Ulm \\" }"}}'
TRICKY = ToolCall("f", '{"a": "<tool_call>}</tool_call>"}')
JSON_TRICKY = '{"name": "f", "arguments": {"a": "<tool_call>}</tool_call>"}}'
OTHER = '{"name": "other", "arguments": {}}'

CASES: list[tuple[str, str, list[Delta]]] = [
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
    ("llama3_json", f"{JSON_F} is a call", [f"{JSON_F} is a call"]),
    ("llama3_json", f"see {JSON_F}", [f"see {JSON_F}"]),
    ("llama3_json", "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    ("json", f"```json\n[{JSON_F}, {JSON_G}]\n```", [F, G]),
    ("json", JSON_G, [G]),
    ("json", '{"a": [1, 2]} tail', ['{"a": [1, 2]} tail']),
    ("json", '{"a": ', ['{"a": ']),
    ("json", "``` x", ["``` x"]),
    ("json", "  ", ["  "]),
]


def deltas_of(form: str, pieces: list[str]) -> list[Delta]:
    """What the parser reports, contents that follow one another as one."""
    parser = tool_parser(FORMATS[form], NAMES)
    found = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    merged: list[Delta] = []
    for delta in found:
        if isinstance(delta, str) and merged and isinstance(merged[-1], str):
            merged[-1] += delta
        else:
            merged.append(delta)
    return merged


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_every_text_whole_by_characters_and_in_two_pieces(form: str, text: str, expected: list[Delta]) -> None:
    assert deltas_of(form, [text]) == expected
    assert deltas_of(form, list(text)) == expected
    for cut in range(len(text)):
        assert deltas_of(form, [text[:cut], text[cut:]]) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=12))
def test_every_split_gives_the_same_deltas(case: tuple[str, str, list[Delta]], cuts: list[int]) -> None:
    form, text, expected = case
    ends = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    assert deltas_of(form, [text[start:end] for start, end in pairwise(ends)]) == expected


@given(
    st.sampled_from(sorted(FORMATS)), st.text(alphabet='<tool_ca>/[]TOLCS{}"\\:; nf', max_size=40), st.integers(1, 5)
)
def test_text_of_marks_and_braces_never_depends_on_the_pieces(form: str, text: str, size: int) -> None:
    whole = deltas_of(form, [text])
    assert deltas_of(form, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    if not any(isinstance(delta, ToolCall) for delta in whole):
        assert "".join(map(str, whole)) == text  # nothing is lost


def test_a_parser_that_looks_at_pieces_would_fail_here() -> None:
    """The negative control: a mark found only where it is one piece."""
    form, text, expected = CASES[1]

    def naive(pieces: list[str]) -> bool:
        return any("<tool_call>" in piece for piece in pieces)

    assert naive([text]) and not naive(list(text))
    assert deltas_of(form, list(text)) == expected


def test_content_is_not_held_longer_than_needed() -> None:
    parser = tool_parser(FORMATS["hermes"], NAMES)
    assert parser.push("some words") == ["some words"]
    assert parser.push(" and <to") == [" and"]
    assert parser.push("y>") == [" <toy>"]
    parser = tool_parser(FORMATS["json"], NAMES)
    assert parser.push("I think") == ["I think"]


def test_the_format_of_a_template() -> None:
    assert format_of_template("... <tool_call> ...") == "hermes"
    assert format_of_template("[TOOL_CALLS]") == "mistral"
    assert format_of_template("<|start_header_id|> ... <|python_tag|>") == "llama3_json"
    assert format_of_template('<|start_header_id|> {"name": , "parameters": }') == "llama3_json"
    assert format_of_template("{{ tools | tojson }}") == "json"
