"""docs/models.md has the result of ``observe`` in every row, and models listed as exported match transformers."""

from __future__ import annotations

import re

import pytest
import transformers as hf

from tests.exporter.tracing.architectures import ROWS
from tests.exporter.tracing.model_check import Comparison, compare, config_of
from tests.exporter.tracing.model_table import COMMAND, DOCUMENT, document
from tests.exporter.tracing.model_types import MODEL_TYPES

TEXT = DOCUMENT.read_text(encoding="utf-8")
_WORDS = re.compile(r"^\| ([\w.-]+) \|(?: `\w+` \|)? (exported|refused) \|", re.MULTILINE)
# What reads as a leak of our code or of Python's instead of a reason.
CRYPTIC = re.compile(r"\('specrt'\)|Mask'|NoneType|KeyError|AttributeError|TypeError|positional argument")
GAVE_THE_SAME_IDS = """gemma2 gemma3_text opt gpt_neox gptj codegen gpt_bigcode phi phi3 stablelm starcoder2 cohere2
exaone4 hunyuan_v1_dense ernie4_5 seed_oss apertus arcee helium nemotron persimmon bitnet glm ministral ministral3 qwen2
biogpt smollm3 olmo3 vaultgemma nanochat llama lfm2-attention-only"""


def verdicts(text: str) -> dict[str, str]:
    return dict(_WORDS.findall(text))


def differences(text: str) -> list[str]:
    """Lines of ``text`` that are not the document's, and lines that it lacks."""
    return sorted(set(text.splitlines()) ^ set(_made().splitlines()))


_CACHE: list[str] = []


def _made() -> str:
    if not _CACHE:
        _CACHE.append(document())
    return _CACHE[0]


needs_its_version = pytest.mark.skipif(
    f"transformers {hf.__version__}:" not in TEXT, reason=f"docs/models.md is of another transformers; run {COMMAND}"
)


@needs_its_version
def test_every_row_matches_observe() -> None:
    assert differences(TEXT) == [], f"run {COMMAND}"
    assert _made() == TEXT


@needs_its_version
def test_a_wrong_verdict_or_reason_would_be_detected() -> None:
    wrong = TEXT.replace("| bloom | refused |", "| bloom | exported |")
    assert wrong != TEXT and len(differences(wrong)) == 2
    wrong = TEXT.replace("attention sinks", "something", 1)
    assert wrong != TEXT and len(differences(wrong)) == 2


@needs_its_version
def test_every_model_type_has_a_verdict_in_the_field_s_words() -> None:
    found = verdicts(TEXT)
    assert set(found) == {*ROWS, *MODEL_TYPES}
    assert [line for line in TEXT.splitlines() if line.startswith("|") and CRYPTIC.search(line)] == []
    assert [name for name in GAVE_THE_SAME_IDS.split() if found[name] != "exported"] == []


def test_a_comparison_can_fail() -> None:
    assert Comparison(1e-6, [1, 2], [1, 2]).is_equal
    assert not Comparison(1e-3, [1, 2], [1, 2]).is_equal
    assert not Comparison(1e-6, [1, 2], [1, 3]).is_equal


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, verdict in verdicts(TEXT).items() if verdict == "exported"])
def test_what_is_called_exported_gives_transformers_ids(name: str) -> None:
    found = compare(config_of(name))
    assert found.is_equal, f"{found.error:.1e}"
