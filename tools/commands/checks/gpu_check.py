"""``specrt gpu-check``: experiments on the GPU of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from specrt.engines.errors import BackendError, SpecrtError


@click.command("gpu-check")
@click.argument("kit", metavar="[KIT]", type=click.Path(path_type=Path), default="gpu-kit.tar.gz")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default="gpu-check.json",
    show_default=True,
    help="Where to write the figures; the page is next to it, in .md.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures too, as one JSON object.")
def gpu_check(kit: Path, output: Path, as_json: bool) -> None:
    """Run ten experiments on this machine's GPU, without a network, in eight minutes at most.

    KIT is a file that 'make gpu-kit' wrote, or a bundle. Exit code 0 if none failed, 1 if one did, 9 if none could run.
    """
    from specrt.tools.gpu_check.check import gpu_check as run
    from specrt.tools.gpu_check.report import check_output, summary, write_report
    from specrt.tools.gpu_check.table import EXPERIMENTS
    from specrt.tools.terminal.progress import shown_steps

    check_output(output)
    with shown_steps(len(EXPERIMENTS)) as progress:
        report = run(kit, progress=progress)
    write_report(report, output)
    if as_json:
        click.echo(json.dumps(report.as_dict()))
    line = summary(report, output)
    if report.exit_code == BackendError.exit_code:
        raise BackendError(f"no experiment could run ({report.no_gpu or report.outcomes[0].reason}); {line}")
    if report.exit_code:
        raise SpecrtError(f"experiments failed; {line}")
    if not as_json:
        click.echo(line)
