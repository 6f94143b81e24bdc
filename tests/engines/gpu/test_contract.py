"""What specrt relies on of a GPU: one suite, on the simulated driver and, where there is a GPU, on the real one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrt.engines.contract import ROW_INDICES
from specrt.engines.gpu import device as devices
from specrt.engines.gpu.device import Device, DeviceArray
from tests.engines.gpu.copying import CONTRACT, SIZE, Copying, check_graph, content, in_four_threads
from tests.engines.gpu.simulated_cuda import SimulatedCuda


def test_memory_is_zeroed_and_aligned(array: DeviceArray) -> None:
    assert array.address % 256 == 0
    assert not content(array).any()


def test_what_was_uploaded_may_be_changed_at_once(device: Device, array: DeviceArray) -> None:
    values = np.arange(SIZE)
    device.upload(array.address, values)
    values[:] = -1
    assert content(array).tolist() == list(range(SIZE))


def test_uploads_beyond_the_page_locked_area(device: Device, array: DeviceArray, monkeypatch: Any) -> None:
    """The area is used again after a wait, and larger tensors go in pieces."""
    monkeypatch.setattr(devices, "UPLOAD_BYTES", 2048)
    for round_number in range(5):
        device.upload(array.address, np.arange(SIZE) + round_number)
    assert content(array).tolist() == list(range(4, SIZE + 4))


def test_work_runs_in_its_order(device: Device, array: DeviceArray) -> None:
    """A copy takes what was there before it, and not what is uploaded after it."""
    first, second = array[0:4], array[4:8]
    device.upload(first.address, np.full(4, 1))
    device.copy(second.address, first.address, 32)
    device.upload(first.address, np.full(4, 2))
    assert content(array)[:8].tolist() == [2, 2, 2, 2, 1, 1, 1, 1]


def test_one_read_of_several_tensors_is_one_wait(device: Device, array: DeviceArray, monkeypatch: Any) -> None:
    waits: list[int] = []
    wait = device.api.wait

    def counted() -> None:
        waits.append(1)
        wait()

    monkeypatch.setattr(device.api, "wait", counted)
    device.upload(array.address, np.arange(SIZE))
    found = device.read([array[0:3], array[5:7]])
    assert [part.tolist() for part in found] == [[0, 1, 2], [5, 6]]
    assert len(waits) == 1


def test_a_graph_repeats_what_was_captured(device: Device, array: DeviceArray) -> None:
    check_graph(device, array)


def test_a_capture_that_fails_leaves_the_stream_as_it_was(device: Device, array: DeviceArray) -> None:
    """By its answer, or by an exception: what comes next works, and another capture too."""
    api = device.api

    def raises() -> bool:
        raise KeyError("of the library")

    assert api.capture(lambda: False) is None
    with pytest.raises(KeyError):
        api.capture(raises)
    device.upload(array.address, np.arange(SIZE))
    assert content(array)[-1] == SIZE - 1
    check_graph(device, array)


def test_an_event_that_the_stream_has_not_come_to_is_no_error(device: Device, array: DeviceArray) -> None:
    """How long it took is known after a wait. On a real GPU it may be known before."""
    api = device.api
    first, last = api.new_event(), api.new_event()
    api.record(first)
    device.upload(array.address, np.arange(SIZE))
    api.record(last)
    early = api.elapsed_ms(first, last)
    assert early is None or early >= 0
    device.wait()
    elapsed = api.elapsed_ms(first, last)
    assert elapsed is not None and 0 <= elapsed < 1e4
    for event in (first, last):
        api.drop_event(event)


def test_events_belong_to_bindings(device: Device) -> None:
    """What one binding records while it drafts changes nothing of what another one measured."""
    one, other = (Copying(device, CONTRACT, {}) for _ in range(2))
    assert one.elapsed_ms() is None, "nothing is recorded"
    for number in (0, 1):
        one.mark(number)
    device.wait()
    measured = one.elapsed_ms()
    for number in (0, 1):
        other.mark(number)
    assert measured is not None and one.elapsed_ms() == measured
    device.wait()
    assert other.elapsed_ms() is not None
    for binding in (one, other):
        binding.close()


def test_bindings_in_four_threads(device: Device) -> None:
    """Each thread reads back what it wrote itself, and its own times."""
    wrong: list[str] = []

    def work(number: int) -> None:
        binding = Copying(device, CONTRACT, {})
        for step in range(20):
            binding.mark(0)
            binding.host[ROW_INDICES][:] = 100 * number + step
            binding.upload()
            binding.run(4, 4)
            binding.mark(1)
            (found,) = binding.read("copied")
            if found.tolist() != [100 * number + step] * 4:
                wrong.append(f"thread {number}, step {step}: {found}")
            elapsed = binding.elapsed_ms()
            if elapsed is None or elapsed < 0:
                wrong.append(f"thread {number}, step {step}: {elapsed} ms")
        binding.close()

    in_four_threads(work)
    assert wrong == []


def test_a_closed_binding_gives_all_back(device: Device) -> None:
    if not isinstance(device.api, SimulatedCuda):
        pytest.skip("the real driver counts nothing")
    before = dict(device.api.sizes)
    binding = Copying(device, CONTRACT, {})
    binding.mark(0)
    assert len(device.api.sizes) > len(before)
    binding.close()
    assert device.api.sizes == before
    assert [event.is_dropped for event in device.api.events] == [True, True]


def test_scratch_is_shared_and_grows(device: Device) -> None:
    small = device.scratch(256)
    assert device.scratch(128) == small
    large = device.scratch(4096)
    assert large[1] == 4096 and large != small
    assert device.scratch(256) == large
