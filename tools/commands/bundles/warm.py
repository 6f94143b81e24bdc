"""``specrt warm``: kernels compiled before the first text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specrt.tools.prompting.options import place_of, place_options


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@place_options
def warm(bundle: Path, **options: Any) -> None:
    """Compile what TensorRT-RTX would compile in the first texts of BUNDLE on this GPU, and store it.

    Runs each size of pass of a round, and each sampler, once. Other backends compile nothing when they run.
    """
    from specrt.engines.errors import ResourceError
    from specrt.runtime.runtime import load
    from specrt.tools.terminal.progress import shown_progress

    with load(bundle, **place_of(options)) as runtime:
        if not runtime.cache_paths:
            click.echo(
                f"{bundle}: nothing to warm, {runtime.backend} on {runtime.device} compiles nothing when it runs"
            )
            return
        with shown_progress() as progress:
            runtime.warm(progress)
        for path in runtime.cache_paths:
            if not path.is_file():
                raise ResourceError(f"{path}: not written; make its folder writable, or copy the bundle to one that is")
            click.echo(f"{path}: {path.stat().st_size / 1e6:.1f} MB of kernels for this GPU")
