"""``python -m specrt.tools.plan.calibrate BUNDLE -o device.json``: this machine as a device for ``specrt plan``.

The bandwidth is measured; the peak and the overhead of a node are fitted to T(M) of BUNDLE's target alone. ``--check``
also measures the targets of other bundles, one after the other, and compares them with the plan's predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click
import psutil
from rich.console import Console

from specrt.engines.errors import SpecrtError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.processor import available_cores
from specrt.engines.storage.files import write_text_file
from specrt.tools.machine import bounding_bandwidth
from specrt.tools.plan.roofline import Device, ModelCost, device_text, fit_device, pass_s
from specrt.tools.plan.sizes import DTYPES, Shape, cost_of
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.options import THREADS
from specrt.tools.terminal.outputs import OUTPUT_FILE
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.progress import quiet_libraries
from specrt.tools.terminal.tables import figures_table
from specrt.tools.tune.timing import measure_targets


def cost_of_bundle(bundle: Path) -> ModelCost:
    """The cost of a bundle's target, from its source's config alone."""
    manifest = manifest_from_bundle(bundle)
    entry, k = manifest.target, manifest.num_speculative_tokens
    (dtype,) = [short for short, name in DTYPES.items() if name == entry.spec.dtype]
    return cost_of(entry.source, Shape(dtype, entry.quantization, entry.spec.max_seq_len, k), entry.revision)


@click.command(cls=Tool)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=OUTPUT_FILE, help="Where to store the device.")
@click.option("--check", "others", multiple=True, type=click.Path(path_type=Path), help="Another bundle; repeatable.")
@click.option("--widths", default="1,2,4,6,9", show_default=True, help="At most K + 1 of each bundle.")
@click.option("--past", default=100, show_default=True, help="Cached tokens before each pass.")
@click.option("--repeats", default=15, show_default=True)
@THREADS
def main(
    bundle: Path,
    output: Path | None,
    others: tuple[Path, ...],
    widths: str,
    past: int,
    repeats: int,
    threads: int | None,
) -> None:
    """Measure this machine with BUNDLE's target and predict others."""
    quiet_libraries()
    threads = threads or available_cores()
    costs = {path: cost_of_bundle(path) for path in (bundle, *others)}
    chosen = [int(width) for width in widths.split(",")]
    times: dict[str, dict[int, float]] = {}
    for path in costs:  # one at a time: with an idle 7 GB session loaded, SmolLM2's passes took three times as long
        times.update(measure_targets([path], chosen, past, repeats, threads))
    bandwidth = _bandwidth({path: (costs[path], times[str(path)]) for path in costs}, threads)
    memory = psutil.virtual_memory().total
    source = f"measured: bandwidth; fitted to {bundle.name}: peak, overhead"
    bare = Device(f"this machine, {threads} threads", memory, bandwidth, 1.0, 0.0, False, source)
    device = fit_device(bare, costs[bundle], past, times[str(bundle)])
    _print(device, {path: (costs[path], times[str(path)]) for path in costs}, past)
    if output is not None:
        write_text_file(output, device_text(device))


def _bandwidth(rows: Mapping[Path, tuple[ModelCost, dict[int, float]]], threads: int) -> float:
    """Bytes per second, not less than any pass has read. Raises ``SpecrtError`` where that was not measured."""
    shown = {path: cost.bytes_per_pass / min(times.values()) * 1e3 for path, (cost, times) in rows.items()}
    path = max(shown, key=lambda path: shown[path])
    bandwidth, bounds = bounding_bandwidth(shown[path], threads)
    if not bounds:
        raise SpecrtError(
            f"calibration: got a bandwidth of {bandwidth / 1e9:.1f} GB/s, and passes of {path.name} read "
            f"{shown[path] / 1e9:.1f} GB/s; calibrate a quiet machine, with a model larger than its caches"
        )
    return bandwidth


def _print(device: Device, rows: dict[Path, tuple[ModelCost, dict[int, float]]], past: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{device.bandwidth_bytes_per_s / 1e9:.1f} GB/s, {device.flops_per_s / 1e9:.0f} GFLOPS, "
        f"{device.node_overhead_us:.1f} us a node"
    )
    headings = ("bundle", "M", "measured", "predicted", "difference")
    table = figures_table("ms of a pass of M tokens: measured, predicted, difference", headings)
    for path, (cost, times) in rows.items():
        for width, ms in times.items():
            predicted = pass_s(cost, device, width, past) * 1e3
            table.add_row(path.name, str(width), f"{ms:.2f}", f"{predicted:.2f}", f"{predicted / ms - 1:+.0%}")
    console.print(table)


if __name__ == "__main__":
    run_process(lambda: main, restarts=True)
