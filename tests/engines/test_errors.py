"""What a message takes over from the error of a library."""

from __future__ import annotations

from specrt.engines.errors import kind_and_line, one_line


def test_text_is_one_line_of_a_limited_length() -> None:
    assert one_line(ValueError("a\n  b\tc")) == "a b c"
    assert one_line(ValueError("x" * 999), limit=5) == "xxxxx"
    assert one_line("text") == "text"
    assert one_line(ValueError()) == one_line(ValueError(" \n")) == "ValueError"


def test_the_type_goes_before_the_text() -> None:
    assert kind_and_line(KeyError("a")) == "KeyError: 'a'"
