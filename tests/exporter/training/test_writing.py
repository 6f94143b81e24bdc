"""The text of many lanes against whole passes of the model, its parts, and what a killed process leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specrt.engines.errors import UsageError
from specrt.exporter.training.prompts import GivenPrompts, own_prompts
from specrt.exporter.training.recipe import TextRecipe
from specrt.exporter.training.store import INDEX, Store, row_bytes
from specrt.exporter.training.target import TrainingTarget
from specrt.exporter.training.writing import TextWriter
from tests.exporter.training.tiny_training import small_text, tiny_target, write_tiny_text


@pytest.fixture(scope="module")
def target() -> TrainingTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def store(target: TrainingTarget, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_tiny_text(tmp_path_factory.mktemp("text"), target, small_text(900))


def test_lanes_store_what_a_whole_pass_computes(target: TrainingTarget, store: Store) -> None:
    for entry in store.entries:
        rows = store.rows(entry)
        with torch.no_grad(), target.tapped() as found:
            logits = target.model(input_ids=torch.from_numpy(rows.ids.astype(np.int64))[None]).logits[0]
        scored = slice(rows.first_written - 1, None)
        np.testing.assert_allclose(rows.taps, found.taps[0], rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(rows.last, found.last[0], rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(rows.normalizer[scored], logits.logsumexp(-1)[scored], rtol=1e-4, atol=1e-4)
        assert (rows.top[scored] == logits.argmax(-1)[scored].numpy()).mean() > 0.98  # near-ties apart


def test_half_of_the_answers_are_greedy(target: TrainingTarget, store: Store) -> None:
    greedy = [
        bool((rows.ids[rows.first_scored :] == rows.top[rows.first_scored - 1 : -1]).all())
        for rows in map(store.rows, store.entries)
        if len(rows.ids) > rows.first_scored + 8
    ]
    assert 0.25 < np.mean(greedy) < 0.75


def test_conversations_have_the_parts_of_the_chat_template(target: TrainingTarget, store: Store) -> None:
    outlines = own_prompts(target.tokenizer, target.eos_ids, small_text())
    outline = outlines(0)
    for entry in store.entries:
        rows = store.rows(entry)
        closing = rows.ids[rows.first_scored - len(outline.closing) : rows.first_scored]
        assert tuple(rows.ids[: len(outline.opening)]) == outline.opening
        assert tuple(closing) == outline.closing
        assert rows.first_written == len(outline.opening) < rows.first_scored - len(outline.closing) + 1
        assert not set(target.eos_ids) & set(rows.ids[rows.first_scored :].tolist())


def test_the_held_out_part_is_one_conversation_in_twenty(store: Store) -> None:
    assert {entry.number for entry in store.chosen(True)} <= {5, 25, 45, 65, 85}
    assert len(list(store.chosen(True))) >= 1
    assert not any(entry.number % 20 == 5 for entry in store.chosen(False))


def test_the_disk_figure_is_that_of_the_files(store: Store) -> None:
    rows = store.num_bytes - (store.folder / INDEX).stat().st_size
    assert rows == store.num_tokens * row_bytes(store.hidden_size)


def test_tokens_that_are_asked_for_are_written(target: TrainingTarget, tmp_path: Path) -> None:
    """Those of conversations that the end cuts off count: no more is written, and no more disk used, than said."""
    store = write_tiny_text(tmp_path, target, small_text(1500, max_answer_tokens=100))
    assert 1500 <= store.num_tokens < 1600, "a token of each lane, and prompts that get an answer in that pass"


def test_conversations_fit_into_a_short_context(target: TrainingTarget, tmp_path: Path) -> None:
    whole = TextRecipe(minutes=None, num_tokens=300, num_lanes=3)
    assert whole.with_short_prompts(2048).with_short_answers(100, 2048) == whole, "the control"
    short = whole.with_short_prompts(64)
    outlines = own_prompts(target.tokenizer, target.eos_ids, short)
    short = short.with_short_answers(outlines.longest_opening, 64)
    store = Store(tmp_path, target.hidden_size)
    TextWriter(target, outlines, short).write(store)
    assert 32 < max(entry.num_tokens for entry in store.entries) < 64
    with pytest.raises(UsageError, match=r"got prompts of up to 50 tokens in a context of 64, expected 16 left for an"):
        whole.with_short_answers(50, 64)


def test_a_killed_process_loses_only_unfinished_conversations(target: TrainingTarget, tmp_path: Path) -> None:
    whole = write_tiny_text(tmp_path / "whole", target, small_text(600))
    write_tiny_text(tmp_path / "cut", target, small_text(200))
    with (tmp_path / "cut" / "taps.bin").open("ab") as file:
        file.write(b"\0" * 1000)  # rows of a conversation whose line was not written
    with (tmp_path / "cut" / INDEX).open("a") as file:
        file.write('{"number": 7')
    before = len(Store(tmp_path / "cut", target.hidden_size).entries)
    again = write_tiny_text(tmp_path / "cut", target, small_text(600))
    assert len(again.entries) > before
    expected = {entry.number: whole.rows(entry) for entry in whole.entries}
    for entry in again.entries:
        rows = again.rows(entry)
        if entry.number in expected:
            length = min(len(rows.ids), len(expected[entry.number].ids))  # the last ones are cut off at the end
            np.testing.assert_array_equal(rows.ids[:length], expected[entry.number].ids[:length])
            np.testing.assert_allclose(rows.taps[:length], expected[entry.number].taps[:length], rtol=1e-2, atol=1e-2)


def test_given_prompts_are_answered_greedily_once() -> None:
    outlines = GivenPrompts([[1, 2], [3], [4, 5, 6]], small_text())
    assert [outlines(n).opening for n in range(4)] == [(1, 2), (3,), (4, 5, 6), (1, 2)]
    assert [outlines(n).is_held_out for n in range(6)] == [False, False, True] * 2
    assert outlines(1).temperature == 0.0 and all(outlines(n).temperature == 0.7 for n in range(3, 9))


def test_a_prompt_is_continued_from_all_of_its_ids(target: TrainingTarget, tmp_path: Path) -> None:
    recipe = TextRecipe(minutes=None, num_tokens=100, num_lanes=3, max_answer_tokens=12)
    prompts = [list(range(5, 25)), list(range(40, 45))]
    store = Store(tmp_path, target.hidden_size)
    TextWriter(target, GivenPrompts(prompts, recipe), recipe).write(store)
    for entry in store.entries:
        rows = store.rows(entry)
        assert rows.ids[: rows.first_scored].tolist() == prompts[entry.number % 2]
        with torch.no_grad():
            logits = target.model(input_ids=torch.from_numpy(rows.ids.astype(np.int64))[None]).logits[0]
        assert (logits.argmax(-1).numpy()[rows.first_scored - 1 :] == rows.top[rows.first_scored - 1 :]).mean() > 0.9
