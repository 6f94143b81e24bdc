"""``specrt compare``: the graphs of a bundle on two backends."""

from __future__ import annotations

import json
from pathlib import Path

import click

from specrt.engines.errors import SpecrtError
from specrt.tools.terminal.options import AS_JSON


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", metavar="NAME", help="The backend to compare with ONNX Runtime. [default: the bundle's]")
@click.option("--device", metavar="cpu|cuda", help="Where it runs. [default: cuda where a GPU is found]")
@click.option("--verbose", "-v", is_flag=True, help="Print Polygraphy's report to standard error.")
@AS_JSON
def compare(bundle: Path, backend: str | None, device: str | None, verbose: bool, as_json: bool) -> None:
    """Compare BUNDLE's samplers and models with ONNX Runtime by Polygraphy, output by output. Exit code 0 or 1.

    Without a GPU, ONNX Runtime is compared with the samplers in numpy and the stored logits of the torch model.
    """
    from specrt.tools.compare.compare import compare as run
    from specrt.tools.compare.table import lines_of
    from specrt.tools.terminal.progress import shown_progress

    with shown_progress() as progress:
        comparison = run(bundle, backend, device, progress, verbose)
    if as_json:
        click.echo(json.dumps(comparison.as_dict()))
    else:
        click.echo("\n".join(lines_of(comparison)))
    if failed := comparison.failed:
        raise SpecrtError(f"{bundle}: {len(failed)} of {len(comparison.results)} outputs differ: {', '.join(failed)}")
