"""Signals while text is written: what was written of each answer is stored, whole and once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrt.engines.progress import Silent
from specrt.exporter.training.prompts import own_prompts
from specrt.exporter.training.recipe import TextRecipe
from specrt.exporter.training.store import Rows, Store
from specrt.exporter.training.target import TrainingTarget
from specrt.exporter.training.writing import TextWriter
from tests.exporter.training.tiny_training import small_text, tiny_target, write_tiny_text

ENDLESS = 10**6


@pytest.fixture(scope="module")
def target() -> TrainingTarget:
    return tiny_target()


@contextmanager
def interruptible(number: signal.Signals) -> Iterator[None]:
    """Inside the block the signal raises ``KeyboardInterrupt``, as Ctrl-C does in a command."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Interrupting(Silent):
    """Sends Ctrl-C to this process once ``num_tokens`` are written."""

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def advance(self, amount: int) -> None:
        self._left -= amount
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGINT)


def writer_of(target: TrainingTarget, recipe: TextRecipe) -> TextWriter:
    return TextWriter(target, own_prompts(target.tokenizer, target.eos_ids, recipe), recipe)


def ids_of(store: Store) -> dict[int, list[int]]:
    return {entry.number: store.rows(entry).ids.tolist() for entry in store.entries}


def test_ctrl_c_loses_no_answer_in_progress(target: TrainingTarget, tmp_path: Path) -> None:
    """The store is that of a run that ends by itself in the same pass, and the next run goes on from there."""
    whole = write_tiny_text(tmp_path / "whole", target, small_text(400))
    store = Store(tmp_path / "stopped", target.hidden_size)
    with interruptible(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        writer_of(target, small_text(ENDLESS)).write(store, Interrupting(400))
    again = Store(tmp_path / "stopped", target.hidden_size)
    assert ids_of(again) == ids_of(store) == ids_of(whole)
    assert len({len(ids) for ids in ids_of(again).values()}) > 1, "some answers were cut off"
    more = write_tiny_text(tmp_path / "stopped", target, small_text(700))
    assert ids_of(more).items() >= ids_of(whole).items() and more.num_tokens >= 700


def test_an_error_stores_no_answer_in_progress(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what a fault may have spoilt is not kept."""
    writer, store = writer_of(target, small_text(ENDLESS)), Store(tmp_path, target.hidden_size)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(writer, "_pass", fail)
    with pytest.raises(MemoryError):
        writer.write(store)
    assert store.entries == []


def test_a_finished_answer_is_stored_once(
    target: TrainingTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while its lane begins the next conversation."""
    writer, store = writer_of(target, small_text(ENDLESS, num_lanes=8)), Store(tmp_path, target.hidden_size)
    begin = writer._begin

    def stopped(outline: Any, *others: Any) -> Any:
        if outline.number == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return begin(outline, *others)

    monkeypatch.setattr(writer, "_begin", stopped)
    with interruptible(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        writer.write(store)
    assert sorted(entry.number for entry in store.entries) == list(range(8))


class Halting:
    """Rows of which the last values cannot be read before Ctrl-C."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        if name == "normalizer":
            os.kill(os.getpid(), signal.SIGINT)
        return getattr(self._rows, name)


def test_an_interrupted_add_leaves_no_rows(target: TrainingTarget, tmp_path: Path) -> None:
    store = write_tiny_text(tmp_path, target, small_text(100))
    rows = store.rows(store.entries[0])
    halting: Any = Halting(store.rows(store.entries[1]))
    with (
        interruptible(signal.SIGINT),
        pytest.raises(KeyboardInterrupt),
        store.interruptible(lambda: store.add(99, rows, 1.0, False)),
    ):
        store.add(98, halting, 1.0, False)
    again = Store(tmp_path, target.hidden_size)
    assert [entry.number for entry in again.entries[-2:]] == [store.entries[-2].number, 99]
    found = again.rows(again.entries[-1])
    for name in ("ids", "taps", "last", "normalizer", "top"):
        np.testing.assert_array_equal(getattr(found, name), getattr(rows, name))


def stopped_by_clock(seconds: float, writer: TextWriter, store: Store) -> bool:
    """Whether a signal after ``seconds`` of this process's time ended the writing."""
    with interruptible(signal.SIGVTALRM):
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        try:
            writer.write(store)
        except KeyboardInterrupt:
            return True
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return False


@pytest.mark.slow
def test_signals_at_any_moment_leave_whole_conversations(target: TrainingTarget, tmp_path: Path) -> None:
    """In a pass, between an answer's rows and its line of the index, or while a lane begins the next conversation."""
    recipe, num_stopped = small_text(600, num_lanes=4, max_answer_tokens=6), 0
    draws = np.random.default_rng(0)
    while True:
        store = Store(tmp_path, target.hidden_size)
        if not stopped_by_clock(draws.uniform(0.001, 0.02) + 1e-3 * num_stopped, writer_of(target, recipe), store):
            break
        assert store.entries == Store(tmp_path, target.hidden_size).entries
        num_stopped += 1
    assert num_stopped > 3
    assert len(ids_of(store)) == len(store.entries), "each is stored once"
    for entry in store.entries:
        rows = store.rows(entry)
        with torch.no_grad(), target.tapped() as found:
            target.model(input_ids=torch.from_numpy(rows.ids.astype(np.int64))[None])
        np.testing.assert_allclose(rows.taps, found.taps[0], rtol=2e-2, atol=2e-2)
