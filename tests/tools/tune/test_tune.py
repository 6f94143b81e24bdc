"""``specrt tune``: what it measures is what generation goes by, and only where it was measured."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import specrt
from specrt.engines.codec import to_json
from specrt.engines.errors import ResourceError
from specrt.runtime.drafting.adaptive import ASSUMED, MODEL, ngram_source
from specrt.runtime.drafting.tuning import Tuning, fingerprint, tuning_for, tuning_path, write_tuning
from specrt.tools.cli import main
from specrt.tools.tune.tune import Count, _count_lookups, tune

PLACES = ("onnxruntime on cpu", "onnxruntime on cuda")


def counts_of(tokens: list[int], num_prompt: int, k: int) -> dict[str, Count]:
    counts = {source: Count([0] * k, [0] * k) for source in ASSUMED}
    _count_lookups(tokens, num_prompt, k, counts)
    return counts


def test_lookups_are_counted_as_they_would_have_been_verified() -> None:
    """The text 1 2 3 4 | 1 2 3 9: after 1 it continues with 2 3, as drafted, and then differently."""
    counts = counts_of([1, 2, 3, 4, 1, 2, 3, 9, 7], 4, 3)
    after_1, after_1_2, after_1_2_3 = (counts[ngram_source(size)] for size in (1, 2, 3))
    assert (after_1.verified, after_1.accepted) == ([1, 1, 1], [1, 1, 0])
    assert (after_1_2.verified, after_1_2.accepted) == ([1, 1, 0], [1, 0, 0])
    assert (after_1_2_3.verified, after_1_2_3.accepted) == ([1, 0, 0], [0, 0, 0])


def test_tokens_beyond_the_text_are_not_verified() -> None:
    count = counts_of([1, 2, 3, 4, 1, 2], 4, 5)[ngram_source(1)]
    assert (count.verified, count.accepted) == ([1, 0, 0, 0, 0], [1, 0, 0, 0, 0])


def test_rates_use_the_assumed_ones_only_where_few_tokens_were_verified() -> None:
    assert Count([0, 0], [0, 0]).rates(0.4) == (0.4, 0.4)
    many = Count([1000, 900], [900, 90])
    assert many.rates(0.4) == pytest.approx((0.9, 0.1), abs=0.01)


def test_generation_goes_by_the_tuning(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.symlink_to(tiny_bundle)
    result = CliRunner().invoke(main, ["tune", str(bundle), "--max-new-tokens", "8", "--json", "--threads", "1"])
    assert result.exit_code == 0, result.output
    tuning = json.loads(result.stdout)
    k = specrt.load(bundle).manifest.num_speculative_tokens
    assert list(tuning["target_ms"]) == [str(width) for width in range(1, k + 2)]
    assert all(ms > 0 for ms in [*tuning["target_ms"].values(), *tuning["draft_ms"].values()])
    assert len(tuning["acceptance"][MODEL]) == k
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with specrt.load(bundle, threads=1) as runtime:
            assert runtime.estimates.target.as_dict() == {int(w): ms for w, ms in tuning["target_ms"].items()}
            assert runtime.estimates.acceptance[MODEL].rates() == pytest.approx(tuning["acceptance"][MODEL], abs=0.01)
    with pytest.warns(UserWarning, match="measured with threads 1, here it is 2; measure again"):
        other = specrt.load(bundle, threads=2)
    assert not other.estimates.target.is_known


@pytest.fixture
def stored(tiny_bundle: Path, tmp_path: Path) -> tuple[Path, Tuning]:
    bundle = tmp_path / "bundle"
    bundle.symlink_to(tiny_bundle)
    tuning = Tuning(fingerprint(bundle, PLACES, 1), "", {"1": 1.0}, {}, {})
    write_tuning(bundle, tuning)
    return bundle, tuning


@pytest.mark.parametrize("name", ["bundle", "cpu", "threads", "backend", "draft_backend", "specrt", "onnxruntime"])
def test_a_tuning_of_another_place_is_not_used_and_reported(stored: tuple[Path, Tuning], name: str) -> None:
    bundle, tuning = stored
    assert tuning_for(bundle, PLACES, 1) == tuning
    data = to_json(tuning)
    data["fingerprint"][name] = "another"
    tuning_path(bundle).write_text(json.dumps(data))
    reported: list[str] = []
    assert tuning_for(bundle, PLACES, 1, reported.append) is None
    assert len(reported) == 1 and f"measured with {name} another" in reported[0] and "specrt tune" in reported[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"target_ms": 3}', "\xff"])
def test_a_file_that_is_no_tuning_is_not_used_and_reported(stored: tuple[Path, Tuning], content: str) -> None:
    bundle, _ = stored
    tuning_path(bundle).write_text(content, encoding="latin-1")
    reported: list[str] = []
    assert tuning_for(bundle, PLACES, 1, reported.append) is None
    assert len(reported) == 1 and "cannot be read" in reported[0]


def test_a_place_that_cannot_be_written_is_refused_first(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ResourceError, match=r"tuning cannot be written there"):
        tune(tiny_bundle, None, 8, threads=1)


def test_times_are_printed_with_the_best_k(stored: tuple[Path, Tuning], capsys: pytest.CaptureFixture[str]) -> None:
    from specrt.tools.tune.tune import print_tuning

    times: dict[str, Any] = {"target_ms": {"1": 10.0, "2": 12.0, "3": 14.0}, "draft_ms": {"1": 1.0}}
    print_tuning(stored[0], Tuning({}, "", acceptance={MODEL: (0.5, 0.5)}, **times))
    shown = capsys.readouterr().out
    # 1.5 tokens in 13 ms and 1.75 in 16, against 1 in 10
    assert "115.4" in shown and "1.15x" in shown and "100.0" in shown
