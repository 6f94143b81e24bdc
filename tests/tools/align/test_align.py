"""Alignment: rounds from chances against rounds that ran, distances by hand, verdicts, and the command on a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import specrt
from specrt.engines.errors import UsageError
from specrt.runtime.round import Round
from specrt.runtime.runtime import Runtime
from specrt.tools.align.align import align, verdict
from specrt.tools.align.tally import Tally, compare_rows, log_softmax, rows_of
from specrt.tools.cli import main
from specrt.tools.prompting.prompts import Prompt

PROMPTS = [Prompt("a", "the dog and the dog and the"), Prompt("b", "def area(radius):")]


def tally(k: int, chances: list[float]) -> Tally:
    counted = Tally(k)
    counted.add(chances)
    return counted


def test_rounds_of_a_draft_that_is_always_right() -> None:
    found = tally(3, [1.0] * 8)
    assert (found.rounds, found.tokens, dict(found.by_drafted)) == (2, 8, {3: 2})
    assert found.acceptance_by_position == [1, 1, 1]
    assert found.mean_acceptance_length == 4


def test_rounds_of_a_draft_that_is_wrong_at_one_place() -> None:
    """Tokens 0 1 | 2 3 4 5 | 6 7: the first round takes one draft and corrects the second."""
    found = tally(3, [1, 0, 1, 1, 1, 1, 1, 1])
    assert dict(found.by_drafted) == {3: 2, 1: 1}
    assert (found.reached, found.accepted) == ([3, 2, 1], [3, 1, 1])


def test_chances_give_expected_rounds() -> None:
    """K = 1, two tokens: the first is drafted; with chance a the round took both, else the second needs a round."""
    found = tally(1, [0.25, 0.5])
    assert dict(found.by_drafted) == {1: 1, 0: 0.75}
    assert found.acceptance_by_position == [0.25]
    assert found.speedup([2.0, 2.5], 0.5) == pytest.approx(2 * 2.0 / (3.0 + 0.75 * 2.0))


def test_rounds_that_ran_are_counted_as_they_were() -> None:
    """The prefill does not count; the second round was cut off by the end of the text."""
    found = Tally(3)
    rounds = [Round([7], is_prefill=True), Round([1, 2, 9], (1, 2, 3), 2), Round([4], (4, 5, 6), 1), Round([8])]
    found.add_rounds(rounds)
    assert (found.reached, found.accepted) == ([2, 2, 1], [2, 1, 0])
    assert (found.tokens, dict(found.by_drafted)) == (5, {3: 2, 0: 1})


def test_a_draft_that_never_helps_costs_its_time() -> None:
    assert tally(2, [0.0] * 10).speedup([1.0, 1.0, 1.0], 0.5) < 0.6


def test_verdicts() -> None:
    assert verdict({1: 0.9, 2: 1.0}).startswith("do not use: at best 1.00")
    assert verdict({1: 1.5, 2: 1.6}).startswith("use: 1.60 times plain decoding with the bundle's K = 2")
    assert verdict({1: 1.5, 2: 1.6, 3: 1.2}).startswith("use with K = 2: 1.60 times plain decoding, 1.20")


def test_softmax_is_stable_and_sums_to_one() -> None:
    row = log_softmax(np.array([1000.0, 1001.0, 0.0], np.float32), 0.5)
    assert np.exp(row).sum() == pytest.approx(1.0)
    assert row[1] - row[0] == pytest.approx(2.0)


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Runtime:
    return specrt.load(tiny_bundle, threads=1)


def test_reading_a_text_gives_the_logits_that_wrote_it(runtime: Runtime) -> None:
    prompt = [5, 6, 7, 8]
    output = runtime.generate(prompt, max_new_tokens=12, draft="none", ignore_eos=True).token_ids
    slot = runtime.open_slot("none")
    rows = list(rows_of(slot.target.model, [*prompt, *output], len(prompt) + 1))
    slot.close()
    assert [int(row.argmax()) for row in rows] == output[1:]


def test_a_model_that_drafts_for_itself_agrees(runtime: Runtime) -> None:
    prompt = [5, 6, 7, 8]
    output = runtime.generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids
    slot = runtime.open_slot("model")
    assert slot.draft is not None
    for temperature, kind in ((0.0, int), (0.8, float)):
        found = compare_rows(slot.target.model, slot.draft.model, prompt, output, temperature)
        assert found.chances == pytest.approx([kind(1)] * 7, abs=1e-6)
        assert max(found.tv) < 1e-6
        assert not found.rejected
    slot.close()


def test_ngram_rounds_are_those_of_the_runtime(runtime: Runtime) -> None:
    prompt = runtime.codec.encode(PROMPTS[0].text)
    few = {5: 1e3, 6: 1e3}  # a text of two ids repeats itself
    how: Any = {"draft": "ngram", "num_speculative_tokens": 4, "ignore_eos": True, "logit_bias": few}
    result = runtime.generate(prompt, max_new_tokens=60, **how)
    counted = Tally(4)
    counted.add_ngram(prompt, result.token_ids)
    assert counted.rounds == result.stats.rounds
    assert sum(counted.accepted) == result.stats.accepted > 0
    assert sum(n * count for n, count in counted.by_drafted.items()) == result.stats.drafted


def test_model_rounds_are_those_of_the_runtime(runtime: Runtime) -> None:
    prompt = runtime.codec.encode(PROMPTS[1].text)
    result = runtime.generate(prompt, max_new_tokens=43, draft="model", num_speculative_tokens=4, ignore_eos=True)
    counted = tally(4, [1.0] * 42)
    assert counted.rounds == result.stats.rounds
    assert sum(counted.accepted) == result.stats.accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bundle_that_drafts_for_itself(tiny_bundle: Path, temperature: float) -> None:
    found = align(tiny_bundle, PROMPTS, 10, temperature, threads=1)
    assert found.acceptance_by_position == pytest.approx((1, 1, 1, 1), abs=1e-5)
    assert set(found.acceptance_by_category) == {"a", "b"}
    assert found.tv == pytest.approx(0, abs=1e-5)
    assert len(found.target_ms) == 5


def test_the_command_writes_what_plan_reads(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, stored = tmp_path / "p.txt", tmp_path / "a.json"
    prompts.write_text("the dog\n")
    options = ["--prompts", str(prompts), "--max-new-tokens", "8", "--threads", "1", "--json", str(stored)]
    run = CliRunner().invoke(main, ["align", str(tiny_bundle), *options], standalone_mode=False)
    assert run.exit_code == 0, run.output
    assert "acceptance by position" in run.stdout
    assert json.loads(stored.read_text())["acceptance_by_position"] == [1.0] * 4


def test_sampling_needs_a_draft_with_probabilities(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from specrt.engines.manifest import DraftEntry, manifest_from_bundle

    manifest = replace(manifest_from_bundle(tiny_bundle), draft=DraftEntry("ngram", None))
    monkeypatch.setattr("specrt.runtime.runtime.manifest_from_bundle", lambda bundle: manifest)
    with pytest.raises(UsageError, match="verified on greedy text"):
        align(tiny_bundle, PROMPTS, 4, 0.7, threads=1)
