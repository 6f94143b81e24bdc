"""``python -m specrt.tools.lab.steps BUNDLE...``: the time of a target pass by width, against the memory bound.

T(M) is the median time of a pass of M tokens after ``--past`` cached ones, v(M) = T(M) / T(1). Bundles are interleaved
pass by pass. The bound of a pass is the bytes of weights it must read over the bandwidth measured in the same run.
No bound is shown if a pass was faster because the machine was busy, or if the weights may fit in the caches.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from specrt.engines.backends import choose_backend, choose_device
from specrt.engines.interface import CPU, DEVICES
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.processor import available_cores
from specrt.tools.machine import memory_bound
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process
from specrt.tools.terminal.tables import figures_table
from specrt.tools.tune.timing import measure_targets


@click.command(cls=Tool)
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--widths", default="1,2,4,6", show_default=True, help="Comma-separated; at most K + 1 of each bundle.")
@click.option("--past", default=100, show_default=True, help="Cached tokens before each pass.")
@click.option("--repeats", default=21, show_default=True)
@click.option("--threads", default=None, type=int, help="[default: the cores this process may use]")
@click.option("--backend", help="One of the bundles' backends.  [default: their first]")
@click.option("--device", type=click.Choice(DEVICES), help="[default: cpu; with a TensorRT backend cuda]")
@click.option("--json", "as_json", is_flag=True)
def main(
    bundles: tuple[Path, ...],
    widths: str,
    past: int,
    repeats: int,
    threads: int | None,
    backend: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """T(M), v(M) and the memory bound of the targets of BUNDLES."""
    threads = threads or available_cores()
    chosen = [int(width) for width in widths.split(",")]
    places = {choose_device(choose_backend(manifest_from_bundle(b), backend), device) for b in bundles}
    result = measure_targets(list(bundles), chosen, past, repeats, threads, backend, device)
    memory = {
        name: memory_bound(manifest_from_bundle(Path(name)).target.bytes_per_pass, min(times.values()), threads)
        for name, times in result.items()
        if places == {CPU}  # the host's bandwidth does not apply to a GPU
    }
    if as_json:
        bounds = {name: {"bandwidth_bytes_per_s": bandwidth, "ms": ms} for name, (bandwidth, ms) in memory.items()}
        click.echo(json.dumps({"bounds": bounds, "pass_ms": result}))
        return
    _print(result, memory)


def _print(result: dict[str, dict[int, float]], memory: dict[str, tuple[float | None, float | None]]) -> None:
    table = figures_table(None, ["bundle", "M", "T(M) ms", "v(M)", "GB/s", "bound ms", "T(M) / bound"])
    for name, by_width in result.items():
        first = by_width[min(by_width)]
        bandwidth, bound = memory.get(name, (None, None))
        speed = "-" if bandwidth is None else f"{bandwidth / 1e9:.1f}"
        for width, ms in by_width.items():
            bounds = ["-", "-"] if bound is None else [f"{bound:.2f}", f"{ms / bound:.2f}"]
            table.add_row(name, str(width), f"{ms:.2f}", f"{ms / first:.2f}", speed, *bounds)
    Console().print(table)


if __name__ == "__main__":
    run_process(lambda: main, restarts=True)
