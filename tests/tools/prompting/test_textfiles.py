"""Files of text: byte order marks, other encodings, lines that end with a newline alone; escapes of ``--stop``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.errors import UsageError
from specrt.tools.prompting.prompts import Prompt, prompts_from_file
from specrt.tools.prompting.stop_strings import unescaped
from specrt.tools.prompting.textfiles import lines_of, read_text, without_final_newline

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e"  # at each of them str.splitlines breaks
UNICODE = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"))),
    st.sampled_from(["\n", "\r\n"]),
)
def test_lines_are_split_at_newlines_alone(lines: list[str], end: str) -> None:
    assert lines_of(end.join(lines)) == (lines or [""])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["no mark", "mark"])
def test_separators_inside_json_strings_split_nothing(tmp_path: Path, mark: bytes, end: str) -> None:
    text = f"a{SEPARATORS}b"
    rows = [json.dumps({"prompt": text, "category": "x"}, ensure_ascii=False), "", '{"prompt": "two"}', ""]
    for raw in rows[:1]:
        assert len(raw.splitlines()) > 1, "the control: splitlines breaks the row"
    (tmp_path / "p.jsonl").write_bytes(mark + end.join(rows).encode())
    assert prompts_from_file(tmp_path / "p.jsonl") == (Prompt("x", text), Prompt("line 2", "two"))
    (tmp_path / "p.txt").write_bytes(mark + end.join([text, "", "two", ""]).encode())
    assert prompts_from_file(tmp_path / "p.txt") == (Prompt("line 1", text), Prompt("line 2", "two"))


def test_a_bad_row_is_named_by_its_line_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('\n{"prompt": "a"}\n\n{"prompt": 1}\n')
    with pytest.raises(UsageError, match=r"p\.jsonl: line 4 is not a JSON object with a \"prompt\""):
        prompts_from_file(file)


@pytest.mark.parametrize(
    ("row", "is_raw"),
    [('{"prompt": "a", "raw": true}', True), ('{"prompt": "a", "raw": false}', False), ('{"prompt": "a"}', False)],
)
def test_a_row_may_be_raw(tmp_path: Path, row: str, is_raw: bool) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(row)
    assert [prompt.is_raw for prompt in prompts_from_file(file)] == [is_raw]


@pytest.mark.parametrize(
    "row", ['{"prompt": "a", "raw": "yes"}', '{"messages": [{"role": "user", "content": "a"}], "raw": true}']
)
def test_raw_is_true_or_false_and_for_prompts(tmp_path: Path, row: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(row)
    with pytest.raises(UsageError, match="line 1 is not a JSON object"):
        prompts_from_file(file)


@given(st.text(UNICODE))
def test_a_mark_is_no_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "marked.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_text(file) == text


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_unicode_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "text"
    file.write_bytes(("\ufeff" if encoding.endswith("be") else "").encode(encoding) + "text".encode(encoding))
    with pytest.raises(
        UsageError, match=rf"{file}: cannot be read as text \(got (UTF-\d+|zero bytes).*; save it as UTF-8"
    ):
        read_text(file)


def test_bytes_that_are_no_text_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    with pytest.raises(UsageError, match=r"^standard input: cannot be read as text \(.*\); give UTF-8 text$"):
        read_text(None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a\r", "a\r"), ("a", "a"), ("\n", ""), ("", "")],
)
def test_one_final_newline_is_left_out(text: str, expected: str) -> None:
    assert without_final_newline(text) == expected


def escaped(text: str, chars: str) -> str:
    """``text`` with backslashes and ``chars`` escaped."""
    short = {"\n": "\\n", "\t": "\\t", "\\": "\\\\"}
    units = [text.encode("utf-16-be")[i : i + 2].hex() for i in range(0, 2 * len(text.encode("utf-16-be")) // 2, 2)]
    if not chars:
        return "".join("\\u" + unit for unit in units)
    return "".join(short.get(char, char) for char in text)


@pytest.mark.parametrize("chars", ["", "\n\t"], ids=["all", "short"])
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_escapes_give_the_text_back(chars: str, text: str) -> None:
    assert unescaped(escaped(text, chars)) == text


@pytest.mark.parametrize(
    ("text", "escape"),
    [("a\\", "\\\\"), ("\\r", "\\\\r"), ("\\x41", "\\\\x"), ("\\u12", "\\\\u"), ("\\N", "\\\\N"), ("\\\n", "\\\\\n")],
)
def test_other_escapes_are_refused(text: str, escape: str) -> None:
    with pytest.raises(UsageError, match=rf"got the escape {escape}, expected \\n, \\t, \\\\ or \\uXXXX; write a"):
        unescaped(text)


@pytest.mark.parametrize("text", ["\\ud83d", "\\ude00", "\\ude00\\ud83d"])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    assert unescaped("\\ud83d\\ude00") == "😀"
    with pytest.raises(UsageError, match="got half a surrogate pair"):
        unescaped(text)
