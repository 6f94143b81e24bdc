"""A device for each test: the simulated driver, and where there is a GPU the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specrt.engines.gpu.device import Device, DeviceArray
from specrt.engines.gpu.driver import open_cuda
from tests.engines.gpu.copying import SIZE
from tests.engines.gpu.simulated_cuda import SimulatedCuda


@pytest.fixture(params=["simulated", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    api: Any = SimulatedCuda() if request.param == "simulated" else open_cuda()
    opened = Device(api)
    yield opened
    opened.wait()


@pytest.fixture
def array(device: Device) -> Iterator[DeviceArray]:
    address = device.allocate(8 * SIZE)
    yield DeviceArray(device, address, (SIZE,), "int64")
    device.free([address])
