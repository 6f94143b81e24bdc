"""The prompts: twelve kinds, three of them code, chosen by number, by category or as code, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.engines.errors import UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.runtime.text.codec import TextCodec
from specrt.tools.prompting.prompts import (
    BUCKETS,
    Prompt,
    bench_prompts,
    bucket_of,
    choose_prompts,
    encode_prompts,
    load_prompts,
    prompts_from_file,
)

CATEGORIES = (
    "chat code-completion code-edit math extraction summary grounded-qa translation rewriting creative factual lists"
)


def test_there_are_twelve_kinds() -> None:
    prompts = load_prompts()
    assert len(prompts) == 12
    assert len({prompt.category for prompt in prompts}) == 12
    assert len({prompt.text for prompt in prompts}) == 12


def test_code_is_recognized_by_its_category() -> None:
    code = [prompt.category for prompt in load_prompts() if prompt.is_code]
    assert code == ["code-completion", "code-edit", "code-tests"]
    assert all("```python\n" in prompt.text for prompt in load_prompts() if prompt.is_code)


def test_texts_are_neither_scraps_nor_books() -> None:
    lengths = {prompt.category: len(prompt.text.split()) for prompt in load_prompts()}
    assert {name: length for name, length in lengths.items() if not 30 <= length <= 150} == {}


def test_texts_are_clean() -> None:
    for prompt in load_prompts():
        assert prompt.text == prompt.text.strip()
        assert prompt.text.isascii()


def test_the_bench_has_eight_prompts_of_each_of_twelve_categories() -> None:
    prompts = bench_prompts()
    assert sorted({prompt.category for prompt in prompts}) == sorted(CATEGORIES.split())
    assert {prompt.name for prompt in prompts if prompt.category == "math"} == {
        "math",
        *(f"math {i}" for i in range(2, 9)),
    }
    assert (len(prompts), len({prompt.name for prompt in prompts}), len({prompt.text for prompt in prompts})) == (
        96,
    ) * 3


def test_the_bench_begins_with_the_short_list() -> None:
    first = {prompt.category: prompt.text for prompt in bench_prompts(1)}
    short = {prompt.category: prompt.text for prompt in load_prompts() if prompt.category != "code-tests"}
    assert {**first, **short} == first
    assert len(first) == len(short) + 1


def test_the_bench_goes_round_the_categories_and_takes_those_named() -> None:
    assert [p.name for p in bench_prompts(2, ["math", "lists"])] == ["math", "lists", "math 2", "lists 2"]
    with pytest.raises(UsageError, match=r"^categories: got 'poetry', expected some of chat"):
        bench_prompts(1, ["poetry"])


def test_chats_have_two_turns_and_there_are_long_texts() -> None:
    prompts = bench_prompts()
    chats = [prompt for prompt in prompts if prompt.category == "chat"][1:]
    assert all([role for role, _ in prompt.earlier] == ["user", "assistant"] for prompt in chats)
    assert sum(300 <= len(prompt.text.split()) <= 800 for prompt in prompts) >= 8


def test_buckets_are_by_tokens() -> None:
    assert [bucket_of(least) for least in BUCKETS.values()] == list(BUCKETS)
    assert (bucket_of(99), bucket_of(299), bucket_of(5000)) == ("short", "medium", "long")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("2", ["chat", "code-completion"]),
        ("math", ["math"]),
        ("math, chat", ["chat", "math"]),
        ("code", ["code-completion", "code-edit", "code-tests"]),
        ("code,code-edit", ["code-completion", "code-edit", "code-tests"]),
    ],
)
def test_prompts_are_chosen_in_their_own_order(wanted: str, expected: list[str]) -> None:
    assert [prompt.category for prompt in choose_prompts(wanted)] == expected


def test_without_a_choice_all_are_taken() -> None:
    assert choose_prompts() == load_prompts() == choose_prompts("12")


@pytest.mark.parametrize("wanted", ["0", "13", "poetry", "", "math,", "-1"])
def test_other_choices_are_refused(wanted: str) -> None:
    with pytest.raises(UsageError, match=r"^prompts: got .*expected 1 to 12"):
        choose_prompts(wanted)


def test_prompts_become_messages_where_there_is_a_chat_template(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    (ids,) = encode_prompts([Prompt("x", "Hi")], tiny_bundle, manifest)
    assert ids[0] == 0  # <|im_start|>, which the template writes
    assert len(ids) > len("Hi") + 3


def test_raw_prompts_are_plain_text(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    prompts = [Prompt("x", "Hi", is_raw=True), Prompt("x", "Hi")]
    raw, message = encode_prompts(prompts, tiny_bundle, manifest)
    codec = TextCodec.from_bundle(tiny_bundle, manifest.tokenizer, manifest.target.spec.vocab_size)
    assert (raw, message) == (codec.encode("Hi"), codec.encode([{"role": "user", "content": "Hi"}]))
    assert raw != message


def test_a_prompt_without_room_for_its_answer_is_refused(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    prompts = [Prompt("x", "Hi")]
    (ids,) = encode_prompts(prompts, tiny_bundle, manifest)
    room = manifest.target.spec.max_seq_len - len(ids)
    assert encode_prompts(prompts, tiny_bundle, manifest, room) == [ids]
    with pytest.raises(UsageError, match=r"^prompt x: .* do not fit into the bundle's context of 512"):
        encode_prompts(prompts, tiny_bundle, manifest, room + 1)


def test_prompts_of_a_text_file_are_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text('Hello\n\n  {"prompt": "x"}\n', encoding="utf-8")
    assert prompts_from_file(file) == (Prompt("line 1", "Hello"), Prompt("line 2", '  {"prompt": "x"}'))


def test_prompts_of_a_json_lines_file_may_have_categories(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"prompt": "Hello", "category": "greeting"}\n{"prompt": "Bye\\nbye", "more": 1}\n', encoding="utf-8"
    )
    assert prompts_from_file(file) == (Prompt("greeting", "Hello"), Prompt("line 2", "Bye\nbye"))


def test_prompts_of_a_file_may_have_turns_and_are_numbered_in_their_category(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    turns = '[{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]'
    file.write_text(
        '{"prompt": "a", "category": "x"}\n{"messages": ' + turns + ', "category": "x"}\n', encoding="utf-8"
    )
    first, second = prompts_from_file(file)
    assert (first.name, second.name, second.text) == ("x", "x 2", "Hi")
    assert [message["role"] for message in second.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "got no prompts, expected one a line"),
        ("a.jsonl", b"\n \n", "got no prompts, expected one a line"),
        ("a.txt", b"\xff\xfe", "cannot be read as text"),
        ("a.jsonl", b'{"prompt": "x"}\nHello\n', "line 2 is not a JSON object"),
        ("a.jsonl", b'["x"]\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'"x"\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'{"messages": []}\n', "line 1 is not a JSON object"),
        ("a.jsonl", b'{"messages": [{"role": "assistant", "content": "x"}]}\n', "line 1 is not a JSON object"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        prompts_from_file(file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_of_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.txt: cannot be read as text"):
        prompts_from_file(tmp_path / "none.txt")
