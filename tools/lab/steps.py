"""``python -m specrt.tools.lab.steps BUNDLE...``: the time of a target pass by width, against the memory bound.

T(M) is the median time of a pass of M tokens after ``--past`` cached ones, v(M) = T(M) / T(1). Bundles are interleaved
pass by pass. The bound of a pass is the bytes of weights it must read over the bandwidth measured in the same run.
With ``--device cuda`` or a TensorRT backend there is no bound; ``specrt.tools.lab.gpu_rounds`` measures rounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from specrt.engines.load import CPU, DEVICES, choose_backend, choose_device
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.processor import available_cores
from specrt.tools.machine import read_bandwidth
from specrt.tools.terminal.failure import Tool
from specrt.tools.terminal.process import run_process
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
    bandwidth = read_bandwidth(threads) if places == {CPU} else float("nan")  # not a GPU's
    result = measure_targets(list(bundles), chosen, past, repeats, threads, backend, device)
    bounds = {str(b): manifest_from_bundle(b).target.bytes_per_pass / bandwidth * 1e3 for b in bundles}
    if as_json:
        memory = {"bandwidth_bytes_per_s": bandwidth, "bound_ms": bounds} if places == {CPU} else {}
        click.echo(json.dumps({**memory, "pass_ms": result}))
        return
    _print(result, bounds, bandwidth, threads)


def _print(result: dict[str, dict[int, float]], bounds: dict[str, float], bandwidth: float, threads: int) -> None:
    title = "" if bandwidth != bandwidth else f"{bandwidth / 1e9:.1f} GB/s read by {threads} threads"
    table = Table(title=title, title_justify="left")
    columns: list[Any] = ["bundle", "M", "T(M) ms", "v(M)", "bound ms", "T(M) / bound"]
    for column in columns:
        table.add_column(column, justify="left" if column == "bundle" else "right")
    for name, by_width in result.items():
        first = by_width[min(by_width)]
        for width, ms in by_width.items():
            bound = bounds[name]
            table.add_row(name, str(width), f"{ms:.2f}", f"{ms / first:.2f}", f"{bound:.2f}", f"{ms / bound:.2f}")
    Console().print(table)


if __name__ == "__main__":
    run_process(lambda: main, restarts=True)
