"""Predicted time of a pass and a round: bytes over bandwidth, operations over peak, and an overhead for each node.

On a device that ``overlaps`` memory and arithmetic (a GPU) a pass takes the longer of the two, else (our CPU kernels at
a few rows) their sum. Acceptance is a probability by position: of the first drafted token, of the second if the first
was accepted, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

from specrt.engines.codec import from_json
from specrt.engines.errors import UsageError
from specrt.engines.experts import Experts

# Assumptions for the devices of the table, whose figures are the vendors': the share that kernels reach, and the time
# between two kernels of a CUDA graph.
TABLE_EFFICIENCY = 0.8
TABLE_OVERHEAD_US = 2.0


@dataclass(frozen=True)
class Device:
    """``memory_bytes`` None: not known. Bandwidth and peak are those that kernels reach, not the data sheet's.

    ``checked`` states how the figures were compared with ``source``.
    """

    name: str
    memory_bytes: int | None
    bandwidth_bytes_per_s: float
    flops_per_s: float
    node_overhead_us: float
    overlaps: bool
    source: str
    checked: str = ""


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a model on a device. ``bytes_per_pass`` are the weights that a pass of one token reads, KV not counted.

    ``experts`` are those of which a pass is expected to read more with more tokens.
    """

    name: str
    max_seq_len: int
    weights_bytes: int
    bytes_per_pass: int
    kv_bytes: int
    kv_bytes_per_token: int
    scratch_bytes: int
    flops_per_token: int
    num_nodes: int
    experts: Experts | None = None

    def read_bytes(self, width: int) -> int:
        """Weights that a pass of ``width`` tokens is expected to read."""
        return self.bytes_per_pass + (self.experts.further_bytes(width) if self.experts else 0)

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes


@dataclass(frozen=True)
class DeviceRow:
    """A line of devices.json: a vendor's figures and their source.

    ``dense_tflops`` are tensor peaks without sparsity, by type; fp16 (bf16 is the same) and fp8 with fp32 sums.
    ``checked`` states whether the figures are ``quoted`` from the document, follow by ``arithmetic`` from the chip's,
    or were ``not checked``.
    """

    key: str
    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    dense_tflops: dict[str, float]
    source: str
    url: str
    checked: str


def device_table() -> dict[str, Device]:
    """The known devices by key; their peak is that of fp16."""
    devices = {}
    for row in device_rows():
        peak = row.dense_tflops["fp16"]
        device = vendor_device(row.name, row.memory_gb, row.bandwidth_gb_per_s, peak, f"{row.source}, {row.url}")
        devices[row.key] = replace(device, checked=row.checked)
    return devices


def device_rows() -> list[DeviceRow]:
    """The lines of devices.json."""
    text = resources.files("specrt.tools.plan").joinpath("devices.json").read_text(encoding="utf-8")
    return [from_json(DeviceRow, row) for row in json.loads(text)]


def vendor_device(name: str, memory_gb: float | None, bandwidth_gb: float, tflops: float, source: str) -> Device:
    """A GPU by its vendor's figures, of which kernels are assumed to reach ``TABLE_EFFICIENCY``."""
    return Device(
        name,
        None if memory_gb is None else int(memory_gb * 1e9),
        bandwidth_gb * 1e9 * TABLE_EFFICIENCY,
        tflops * 1e12 * TABLE_EFFICIENCY,
        TABLE_OVERHEAD_US,
        True,
        source,
    )


def find_device(name: str) -> Device:
    """A device of the table, or of a file that ``python -m specrt.tools.plan.calibrate`` wrote. Raises
    ``UsageError``.
    """
    if Path(name).suffix == ".json":
        try:
            return from_json(Device, json.loads(Path(name).read_text(encoding="utf-8-sig")))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--device {name}: not a device file ({error}); make one with specrt.tools.plan.calibrate"
            ) from error
    table = device_table()
    if name not in table:
        raise UsageError(
            f"--device {name}: expected one of {', '.join(table)}, or a .json file of specrt.tools.plan.calibrate"
        )
    return table[name]


def pass_s(model: ModelCost, device: Device, width: int, past: int) -> float:
    """Seconds of a pass of ``width`` tokens after ``past`` cached ones."""
    memory = _memory_s(model, device, width, past)
    compute = width * model.flops_per_token / device.flops_per_s
    overhead = model.num_nodes * device.node_overhead_us * 1e-6
    return overhead + (max(memory, compute) if device.overlaps else memory + compute)


def _memory_s(model: ModelCost, device: Device, width: int, past: int) -> float:
    return (model.read_bytes(width) + past * model.kv_bytes_per_token) / device.bandwidth_bytes_per_s


def expected_tokens(acceptance: Sequence[float], k: int) -> float:
    """Tokens of a round of K: 1 + a_1 + a_1 a_2 + ... Positions beyond the last known one are assumed to equal it."""
    total, reached = 1.0, 1.0
    for i in range(k):
        reached *= acceptance[min(i, len(acceptance) - 1)]
        total += reached
    return total


@dataclass(frozen=True)
class Rounds:
    """Times of a pair: ``plain_s`` of a pass of one token, ``round_s[k]`` of a round of K = k, from 0."""

    plain_s: float
    round_s: tuple[float, ...]

    def speedup(self, acceptance: Sequence[float], k: int) -> float:
        """Tokens per second with K = k over those of plain decoding."""
        return expected_tokens(acceptance, k) * self.plain_s / self.round_s[k]

    def best_k(self, acceptance: Sequence[float]) -> int:
        """The K with the most tokens per second; 0 where speculation is slower."""
        return max(range(len(self.round_s)), key=lambda k: (self.speedup(acceptance, k), -k))

    def break_even(self, k: int) -> float | None:
        """The acceptance, the same at every position, at which K = k breaks even; None where even 1 is too low."""
        if self.speedup((1.0,), k) < 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup((middle,), k) >= 1 else (middle, high)
        return high


def rounds_of(target: ModelCost, draft: ModelCost | None, device: Device, max_k: int, past: int) -> Rounds:
    """The times of a pair by the roofline model; without a draft model drafting costs nothing."""
    step_s = 0.0 if draft is None else pass_s(draft, device, 1, past)
    times = [k * step_s + pass_s(target, device, k + 1, past) for k in range(max_k + 1)]
    return Rounds(times[0], tuple(times))


def fit_device(device: Device, model: ModelCost, past: int, pass_ms: dict[int, float]) -> Device:
    """``device`` with the peak and the overhead per node fitted to T(M) of one model; its bandwidth is kept.

    T(M) less bytes over bandwidth is a line in M: its slope is operations over peak, its value at M = 0 the overhead.
    """
    widths = sorted(pass_ms)
    rest_ms = {width: pass_ms[width] - _memory_s(model, device, width, past) * 1e3 for width in widths}
    mean_width, mean_ms = sum(widths) / len(widths), sum(rest_ms.values()) / len(widths)
    spread = sum((width - mean_width) ** 2 for width in widths)
    slope_ms = sum((width - mean_width) * (rest_ms[width] - mean_ms) for width in widths) / spread
    if slope_ms <= 0:
        raise UsageError(f"calibration: passes of {model.name} do not take longer with more rows; measure again")
    overhead_ms = mean_ms - slope_ms * mean_width
    return replace(
        device,
        flops_per_s=model.flops_per_token / (slope_ms * 1e-3),
        node_overhead_us=max(0.0, overhead_ms / model.num_nodes * 1e3),
    )


def device_text(device: Device) -> str:
    """``device`` as the JSON that ``find_device`` reads."""
    return json.dumps(asdict(device), indent=1) + "\n"
