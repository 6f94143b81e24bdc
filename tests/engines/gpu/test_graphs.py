"""Work that is submitted as a whole: on the simulated driver and, where there is a GPU, on the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specrt.engines.contract import ROW_INDICES
from specrt.engines.errors import ResourceError
from specrt.engines.gpu import graphs
from specrt.engines.gpu.device import Device, DeviceArray
from tests.engines.gpu.copying import Capturable, check_graph, content, in_four_threads
from tests.engines.gpu.simulated_cuda import SimulatedCuda


@pytest.fixture
def capturable(device: Device) -> Iterator[Capturable]:
    binding = Capturable(device)
    yield binding
    binding.close()


def work_together(binding: Capturable, start: int, twice: bool = False) -> list[int]:
    """An upload and a pass, or two of each: the second begins with what the first gave, the host writes the rest."""
    rows = binding.host[ROW_INDICES]
    with binding.together():
        rows[:] = np.arange(start, start + 4)
        binding.upload()
        binding.run(4, 4)
        if twice:
            rows[:] = 10 * rows
            binding.upload()
            binding.take(ROW_INDICES, 0, binding.memory["copied"][2:3])
            binding.run(4, 4)
        found: list[int] = binding.read("copied")[0].tolist()
        return found


def test_work_that_recurs_becomes_one_graph(capturable: Capturable) -> None:
    """Enqueued, captured, launched: what the host writes is read at the launch, each upload before its own pass."""
    for start in (1, 5, 2, 7):
        assert work_together(capturable, start) == [start, start + 1, start + 2, start + 3]
        expected = [start + 2, 10 * start + 10, 10 * start + 20, 10 * start + 30]
        assert work_together(capturable, start, twice=True) == expected
    assert len(capturable.graphs._graphs) == 2


def test_a_graph_that_is_launched_again_before_a_wait_reads_its_own_input(capturable: Capturable) -> None:
    """Its page-locked memory may still be read: the second launch waits for the first."""
    other = Capturable(capturable.device)
    rows, marks = capturable.host[ROW_INDICES], other.memory["copied"]
    for start in (1, 2, 3, 4):
        for row in range(2):
            with capturable.together():
                rows[:] = 10 * start + row
                capturable.upload()
                capturable.run(4, 4)
            capturable.device.copy(marks.address + 8 * row, capturable.memory["copied"].address, 8)  # type: ignore[attr-defined]
        assert content(marks)[:2].tolist() == [10 * start, 10 * start + 1]  # type: ignore[arg-type]
    assert len(capturable.graphs._graphs) == 1
    other.close()


def test_graphs_that_were_not_used_longest_are_dropped(
    capturable: Capturable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    for rows in (1, 1, 2, 2, 1, 3, 3, 1):
        with capturable.together():
            capturable.upload()
            capturable.run(4, rows)
    assert [key[-1][-1] for key in capturable.graphs._graphs] == [3, 1]


@pytest.mark.parametrize("method", ["allocate", "allocate_pinned"])
def test_without_memory_for_graphs_the_work_is_done_step_by_step(
    capturable: Capturable, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error there would lose work that the host counts as done."""

    def full(num_bytes: int) -> int:
        raise ResourceError("the GPU is full")

    api = capturable.device.api
    before = dict(api.pinned) if isinstance(api, SimulatedCuda) else {}
    monkeypatch.setattr(api, method, full)
    assert work_together(capturable, 1) == [1, 2, 3, 4]
    with pytest.warns(UserWarning, match="its passes run one by one"):
        assert work_together(capturable, 5) == [5, 6, 7, 8]
    assert work_together(capturable, 9) == [9, 10, 11, 12]
    assert not isinstance(api, SimulatedCuda) or api.pinned == before


def test_an_error_does_not_lose_what_came_before(capturable: Capturable) -> None:
    def fails(start: int) -> None:
        with capturable.together():
            capturable.host[ROW_INDICES][:] = start
            capturable.upload()
            capturable.run(4, 4)
            raise KeyError

    for start in (1, 2, 3):
        with pytest.raises(KeyError):
            fails(start)
        assert capturable.read("copied")[0].tolist() == [start] * 4


def test_marks_are_in_the_graph_and_a_wait_comes_after_what_was_noted(capturable: Capturable) -> None:
    for start in (1, 2, 3):
        with capturable.together():
            capturable.mark(0)
            capturable.host[ROW_INDICES][:] = start
            capturable.upload()
            capturable.run(4, 4)
            capturable.mark(1)
            assert len(capturable.graphs._steps) == 4, "nothing is enqueued"
            capturable.device.wait()
            elapsed = capturable.elapsed_ms()
            assert elapsed is not None and elapsed >= 0
        assert capturable.read("copied")[0].tolist() == [start] * 4
    assert len(capturable.graphs._graphs) == 1
    if isinstance(api := capturable.device.api, SimulatedCuda):
        assert api.counts["record"] == 2, "of the first time; later the graph records"


def test_a_capture_of_one_thread_holds_no_work_of_another(device: Device) -> None:
    """Each thread repeats its own work, from when it is new to when it is a graph."""
    wrong: list[str] = []

    def work(number: int) -> None:
        binding = Capturable(device)
        for step in range(20):
            start = 100 * number + step
            found = work_together(binding, start)
            if found != [start, start + 1, start + 2, start + 3]:
                wrong.append(f"thread {number}, step {step}: {found}")
        binding.close()

    in_four_threads(work)
    assert wrong == []


def test_what_no_capture_allows_is_refused(device: Device, array: DeviceArray) -> None:
    """The simulation is as strict as CUDA: no wait, allocation, release, event or launch within a capture."""
    api = device.api
    if not isinstance(api, SimulatedCuda):
        pytest.skip("on a real driver these leave an invalid capture")
    device.wait()
    graph, event, pinned = api.capture(lambda: True), api.new_event(), api.allocate_pinned(64)
    assert graph is not None
    for forbidden in (
        api.wait,
        lambda: api.allocate(64),
        lambda: api.free(array.address),
        lambda: api.allocate_pinned(64),
        lambda: api.free_pinned(pinned),
        lambda: api.record(event),
        lambda: api.launch(graph),
        lambda: api.capture(lambda: True),
    ):

        def enqueue(forbidden: Any = forbidden) -> bool:
            forbidden()
            return True

        with pytest.raises(AssertionError):
            api.capture(enqueue)
    with pytest.raises(AssertionError):
        api.record(event, is_captured=True)
    api.free_pinned(pinned)
    check_graph(device, array)
