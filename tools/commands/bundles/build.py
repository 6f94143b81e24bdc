"""``specrt build``: engines from a bundle."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--backend", required=True, metavar="tensorrt-rtx|tensorrt", help="The backend to build for.")
@click.option(
    "--compute-capability",
    "capabilities",
    multiple=True,
    metavar="X.Y",
    help="With tensorrt-rtx: a GPU to build for, such as 8.9; may be repeated. [default: all that it knows but 7.5]",
)
@click.option(
    "--decode-profile/--no-decode-profile",
    default=None,
    help="Kernels for passes of one token, with weights stored twice. [default: a draft's, if it saves bytes]",
)
@click.option("--force", is_flag=True, help="Replace existing engines.")
def build(bundle: Path, backend: str, capabilities: tuple[str, ...], decode_profile: bool | None, force: bool) -> None:
    """Build the engines of BUNDLE without torch, on the GPU that runs them, or with tensorrt-rtx on any machine."""
    from specrt.engines.trt.build import build as run
    from specrt.tools.terminal.progress import shown_progress

    with shown_progress() as progress:
        record = run(bundle, backend, capabilities, force, progress, decode_profile)
    total, seconds = (sum(getattr(e, name) for e in record.engines.values()) for name in ("num_bytes", "build_seconds"))
    click.echo(
        f"{bundle}: {len(record.engines)} engines, {total / 1e6:.0f} MB, built in {seconds:.0f} s by {record.builder} "
        f"{record.builder_version} for compute capability {', '.join(record.compute_capabilities)}"
    )
