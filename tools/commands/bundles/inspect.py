"""``specrt inspect``: what a bundle holds."""

from __future__ import annotations

import json
from pathlib import Path

import click

from specrt.tools.terminal.options import AS_JSON


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@AS_JSON
@click.option("--check", is_flag=True, help="Hash every file again, and check that engines fit this machine.")
def inspect(bundle: Path, as_json: bool, check: bool) -> None:
    """Show what BUNDLE holds: roles, the I/O table, widths, bytes of weights and KV."""
    from specrt.tools.builds import builds_of, print_builds
    from specrt.tools.figures import inspection, print_inspection
    from specrt.tools.hashing import checked_manifest

    manifest = checked_manifest(bundle, always_hash=check)
    builds = builds_of(bundle, manifest, check)
    if as_json:
        click.echo(json.dumps(inspection(manifest, builds)))
    else:
        print_inspection(manifest, builds)
        print_builds(builds)
