"""Where a model ends, from every place that sets it; what cannot be read or fetched is an error, never skipped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Gemma3Config, GenerationConfig, LlamaConfig

from specrt.engines.errors import SourceError
from specrt.exporter.sources.ending import eos_ids, generation_defaults, read_generation_config
from specrt.exporter.sources.source import find_source
from tests.exporter.sources.gguf.gguf_files import config_of, model_of, write_gguf
from tests.tiny import save_tiny_model, tiny_tokenizer


def holder(*ids: Any) -> list[Any]:
    return [SimpleNamespace(eos_token_id=value) for value in ids]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (holder(2, [106, 1], 2), (1, 2, 106)),
        (holder(None, 7, None), (7,)),
        (holder(0, None, 0), (0,)),
        (holder([5], (5, 3), 4), (3, 4, 5)),
        (holder(-1, [-1, 9], None), (9,)),
        ([SimpleNamespace(), None, *holder(1)], (1,)),
        (holder(None, None, None), ()),
    ],
)
def test_eos_ids_are_the_union(sources: list[Any], expected: tuple[int, ...]) -> None:
    assert eos_ids(*sources) == expected


@pytest.mark.parametrize("value", ["2", " 2 ", ["2", 1], [2, "1", 2], (1, 2), ["-1", 2, 1]])
def test_ids_may_be_written_as_digits(value: Any) -> None:
    assert set(eos_ids(SimpleNamespace(eos_token_id=value), None, None)) <= {1, 2}
    assert 2 in eos_ids(SimpleNamespace(eos_token_id=value), None, None)


@pytest.mark.parametrize(
    "value",
    [
        True,
        [2, False],
        2.0,
        [1, 2.5],
        "two",
        "",
        "2, 3",
        "²",
        "1" * 5000,
        [[2]],
        [None],
        {"id": 2},
        "</s>",
        float("nan"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_id_is_refused(value: Any) -> None:
    with pytest.raises(SourceError, match=r"^generation config: eos_token_id is .*, expected token ids") as caught:
        eos_ids(SimpleNamespace(eos_token_id=2), SimpleNamespace(eos_token_id=value), None)
    assert len(str(caught.value)) < 250 and "\n" not in str(caught.value)


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    assert eos_ids(SimpleNamespace(eos_token_id=319), None, None, 320) == (319,)
    with pytest.raises(SourceError, match="eos_token_id 320 is outside the vocabulary of 320 ids"):
        eos_ids(SimpleNamespace(eos_token_id=[1, 320]), None, None, 320)


def test_the_text_config_counts() -> None:
    config: Any = Gemma3Config(text_config={"eos_token_id": 106})
    config.eos_token_id = [1]
    assert {1, 106} <= set(eos_ids(config, None, None))
    assert 106 not in eos_ids(LlamaConfig(eos_token_id=[1]), None, None)


def write(folder: Path, content: bytes) -> Path:
    (folder / "generation_config.json").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"eos_token_id": 2}', (2,)),
        (b'{"eos_token_id": [2, 5]}', (2, 5)),
        (b'{"eos_token_id": "2"}', (2,)),
        (b'{"eos_token_id": null}', ()),
        (b"{}", ()),
        (b'\xef\xbb\xbf{"eos_token_id": 2}', (2,)),
    ],
)
def test_a_generation_config_is_read_as_it_is(content: bytes, expected: tuple[int, ...], tmp_path: Path) -> None:
    assert eos_ids(None, read_generation_config("m", str(write(tmp_path, content)), None), None) == expected


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"{bad json", "is not JSON (JSONDecodeError"),
        (b"", "is not JSON (JSONDecodeError"),
        (b"[2]", "is a JSON list, expected an object"),
        (b'"2"', "is a JSON str, expected an object"),
        (b"null", "is a JSON NoneType, expected an object"),
        (b'{"eos_token_id": "\xff"}', "is not JSON (UnicodeDecodeError"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not JSON (JSONDecodeError"),
        (b"[" * 100_000, "is not JSON (RecursionError"),
    ],
    ids=["broken", "empty", "list", "string", "null", "not UTF-8", "LFS pointer", "deep"],
)
def test_a_broken_generation_config_is_one_line(content: bytes, line: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        read_generation_config("m", str(write(tmp_path, content)), None)
    assert f"m: generation_config.json {line}" in str(caught.value) and "\n" not in str(caught.value)


def test_only_a_file_that_is_not_there_is_absent(tmp_path: Path) -> None:
    assert read_generation_config("m", str(tmp_path), None) is None
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "gone")  # as a cache that lost its blobs
    with pytest.raises(SourceError, match=r"generation_config\.json: cannot be read"):
        read_generation_config("m", str(tmp_path), None)


def test_the_ends_of_a_folder_are_all_there(tmp_path: Path) -> None:
    """config.json, generation_config.json and the tokenizer's own, each with another id."""
    folder = save_tiny_model(tmp_path, eos_token_id=7)
    write(folder, b'{"eos_token_id": ["9", 11]}')
    source = find_source(str(folder))
    ends = eos_ids(source.config, source.generation_config(), source.tokenizer, 320)
    assert ends == (tiny_tokenizer().eos_token_id, 7, 9, 11)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (1,)),
        ({"eot": 5}, (1, 5)),
        ({"eom": 6}, (1, 6)),
        ({"eos": 4, "eot": 5, "eom": 6}, (4, 5, 6)),
        ({"eos": 2**32 - 1, "eot": 5}, (5,)),  # how -1 is written
        ({"eos": None}, ()),
        ({"fim_pad": 8}, (1,)),
    ],
)
def test_a_gguf_file_ends_at_each_of_its_keys(keys: dict[str, int], expected: tuple[int, ...], tmp_path: Path) -> None:
    others = {f"tokenizer.ggml.{name}_token_id": value for name, value in keys.items()}
    source = find_source(str(write_gguf(tmp_path / "model.gguf", model_of(config_of("llama")), others=others)))
    assert eos_ids(source.config, source.generation_config(), source.tokenizer, 320) == expected


def test_a_generation_config_next_to_a_gguf_file_is_not_its_own(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", model_of(config_of("llama")))
    write(tmp_path, b'{"eos_token_id": 9, "temperature": 0.1}')
    assert find_source(str(path)).generation_config() is None


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": "0.6"},
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"top_k": True},
        {"top_k": [20]},
        {"repetition_penalty": 10**400},
        {"do_sample": "false"},
        {"do_sample": 0},
    ],
    ids=str,
)
def test_sampling_defaults_that_are_no_numbers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(
        SourceError, match=rf"^generation config: {next(iter(given))} is .*correct generation_config.json"
    ):
        generation_defaults(SimpleNamespace(**given))


@pytest.mark.parametrize("made_by", [GenerationConfig, SimpleNamespace])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_length": 20, "num_beams": 3}, {}),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, {"temperature": 1.0, "top_k": 64.0, "top_p": 0.95}),
        ({"do_sample": True, "temperature": 0.6}, {"temperature": 0.6}),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        (
            {
                "do_sample": True,
                "temperature": 1,
                "top_k": 20,
                "top_p": 0.8,
                "min_p": 0.05,
                "repetition_penalty": 1.05,
                "typical_p": 0.9,
            },
            {"temperature": 1.0, "top_k": 20.0, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.05},
        ),
        ({"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": None}, {"temperature": 0.7, "top_k": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
    ids=[
        "nothing",
        "nothing of ours",
        "sampled at the default temperature",
        "temperature",
        "do_sample is not given",
        "all",
        "neutral and none",
        "greedy",
        "greedy in spite of the rest",
        "greedy with a penalty",
    ],
)
def test_generation_defaults_are_what_the_config_gives_as_floats(
    made_by: type, given: dict[str, Any], expected: dict[str, float]
) -> None:
    found = generation_defaults(made_by(**given))
    assert found == expected
    assert {type(value) for value in found.values()} <= {float}


def test_a_model_without_a_generation_config_has_no_defaults() -> None:
    assert generation_defaults(None) == {}
