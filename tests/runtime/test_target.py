"""What target and draft do with samplers: the random numbers that they give, and further filters of a large nucleus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from specrt.engines import numpy_samplers, samplers
from specrt.engines.contract import LOGITS, ModelSpec
from specrt.engines.fake import FakeSampler
from specrt.engines.interface import Array, Binding
from specrt.runtime.sampling import samplers as slot_samplers
from specrt.runtime.sampling.samplers import SamplerEngines
from specrt.runtime.sampling.uniforms import Uniforms
from specrt.runtime.settings import Settings
from tests.runtime.support.fakes import PROMPT, pair_of
from tests.runtime.support.plain import decode
from tests.runtime.support.tables import hashed_logits, noisy

VOCAB_SIZE = 32
TABLE = hashed_logits(1, VOCAB_SIZE)
DRAFT = noisy(TABLE, 2, VOCAB_SIZE, 0.125)
SETTINGS = Settings(temperature=1.0, seed=5, draft="model", num_speculative_tokens=5, max_new_tokens=60)


class Spy(FakeSampler):
    """Notes the random rows that draws and rules are given."""

    used: ClassVar[list[tuple[float, ...]]] = []

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        if samplers.UNIFORMS in host:
            self.used.extend(map(tuple, host[samplers.UNIFORMS][:rows].tolist()))
        super().compute(host, width, rows)


def test_no_draw_and_no_decision_uses_a_number_twice() -> None:
    """K drafted ids are verified again after a rejection, with other numbers; draft and target share none."""
    Spy.used.clear()
    done = pair_of(TABLE, DRAFT, VOCAB_SIZE, load=Spy).run(replace(SETTINGS, rule="block"))
    assert len(Spy.used) == 1 + done.stats.drafted + done.stats.drafted + done.stats.rounds
    assert len(set(Spy.used)) == len(Spy.used)


@pytest.mark.parametrize("reproducible", [False, True])
def test_match_uses_the_numbers_of_the_position_for_draft_and_target(reproducible: bool) -> None:
    Spy.used.clear()
    done = pair_of(TABLE, DRAFT, VOCAB_SIZE, load=Spy).run(replace(SETTINGS, reproducible=reproducible))
    start, end = len(PROMPT), len(PROMPT) + len(done.token_ids)
    expected = set(map(tuple, Uniforms(5).at_positions(start, end - start).tolist()))
    assert expected <= set(Spy.used)
    beyond = set(map(tuple, Uniforms(5).at_positions(end, 1).tolist())) if reproducible else set()  # of a row repeated
    assert set(Spy.used) <= expected | beyond
    assert len(Spy.used) > len(expected) + done.stats.drafted


class FewSorted(FakeSampler):
    """As if the nuclei of many rows were larger than what a filter sorts: the next one must find them.

    ``filter`` leaves the rows whose first logit is below 2, ``filter-wide`` those below 0.
    """

    def __init__(self, spec: ModelSpec, name: str, vocab_size: int) -> None:
        super().__init__(spec, name, vocab_size)
        self._limit = {samplers.FILTER: 2, samplers.FILTER_WIDE: 0}.get(name)
        self.num_runs = 0

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        if samplers.NUCLEUS_IS_LARGER not in host:
            super().compute(host, width, rows)
            return
        logits, probs, flags = host[LOGITS][:rows], host[samplers.PROBS][:rows], host[samplers.NUCLEUS_IS_LARGER][:rows]
        self.num_runs += 1
        if self._limit is not None:
            super().compute(host, width, rows)
            larger = np.flatnonzero(logits[:, 0] < self._limit)
            flags[:], flags[larger], probs[larger], host[samplers.THRESHOLD][larger] = 0, 1, 1, logits[larger, 0]
            return
        larger = np.flatnonzero(flags)
        assert larger.tolist() == np.flatnonzero(logits[:, 0] < 0).tolist()
        assert np.array_equal(host[samplers.THRESHOLD][larger], logits[larger, 0])
        temperature, top_p, min_p = (host[name][0] for name in (samplers.TEMPERATURE, samplers.TOP_P, samplers.MIN_P))
        probs[larger] = numpy_samplers.filtered(logits[larger], temperature, 0, top_p, min_p)


@pytest.mark.parametrize("rule", ["match", "block"])
@pytest.mark.parametrize("penalties", [{}, {"presence_penalty": 0.5, "repetition_penalty": 2.0}], ids=["bare", "all"])
def test_a_nucleus_larger_than_what_is_sorted_is_found(rule: str, penalties: dict[str, Any]) -> None:
    loaded: dict[str, list[FewSorted]] = {samplers.FILTER: [], samplers.FILTER_WIDE: [], samplers.NUCLEUS: []}

    def load(spec: ModelSpec, name: str, vocab_size: int) -> FakeSampler:
        if name not in loaded:
            return FakeSampler(spec, name, vocab_size)
        loaded[name].append(FewSorted(spec, name, vocab_size))
        return loaded[name][-1]

    three_samplers, one_sampler = pair_of(TABLE, DRAFT, VOCAB_SIZE, load=load), pair_of(TABLE, DRAFT, VOCAB_SIZE)
    settings = replace(SETTINGS, rule=rule, top_p=0.9, min_p=0.01, **penalties)
    for changed in (settings, replace(settings, rule="match"), settings):
        assert three_samplers.run(changed).rounds == one_sampler.run(changed).rounds
    few, more, all_of_them = (sum(sampler.num_runs for sampler in both) for both in loaded.values())
    assert few > more > all_of_them > 0
    assert [len(both) for both in loaded.values()] == [2, 2, 2]  # the target's and the draft's


def test_a_top_k_beyond_what_the_first_filter_sorts_begins_with_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_samplers, "NUM_SORTED", 8)
    loaded: list[str] = []

    def load(spec: ModelSpec, name: str, vocab_size: int) -> FakeSampler:
        loaded.append(name)
        return FakeSampler(spec, name, vocab_size)

    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE, load=load)
    for top_k, has_first in [(9, False), (8, True), (9, True)]:
        settings = replace(SETTINGS, top_k=top_k)
        assert pair.run(settings).token_ids == decode(TABLE, settings, PROMPT)
        assert (samplers.FILTER in loaded) == has_first


@pytest.mark.parametrize("rule", ["match", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_sampler_is_opened_in_a_round(rule: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not those that only rare rows need: loading and binding belong before the first token."""
    opened: list[str] = []
    open_sampler = SamplerEngines.open

    def noted(self: SamplerEngines, name: str, shared: Mapping[str, Array]) -> Binding:
        opened.append(name)
        return open_sampler(self, name, shared)

    monkeypatch.setattr(SamplerEngines, "open", noted)
    pair = pair_of(TABLE, DRAFT, VOCAB_SIZE, load=FewSorted)
    settings = replace(SETTINGS, rule=rule, temperature=temperature, top_p=0.9, repetition_penalty=1.5)
    counts: list[int] = []
    pair.run(settings, between=lambda tokens: counts.append(len(opened)))
    assert len(counts) > 3 and set(counts) == {len(opened)}
