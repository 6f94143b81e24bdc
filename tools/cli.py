"""The ``specrt`` command: a group whose commands are in ``specrt.tools.commands``, one file each."""

from __future__ import annotations

import click

from specrt import __version__
from specrt.tools.commands.bundles.build import build
from specrt.tools.commands.bundles.distill import distill
from specrt.tools.commands.bundles.export import export
from specrt.tools.commands.bundles.inspect import inspect
from specrt.tools.commands.bundles.plan import plan
from specrt.tools.commands.bundles.warm import warm
from specrt.tools.commands.checks.align import align
from specrt.tools.commands.checks.bench import bench
from specrt.tools.commands.checks.compare import compare
from specrt.tools.commands.checks.doctor import doctor
from specrt.tools.commands.checks.gpu_check import gpu_check
from specrt.tools.commands.checks.tune import tune
from specrt.tools.commands.checks.verify import verify
from specrt.tools.commands.texts.batch import batch
from specrt.tools.commands.texts.chat import chat
from specrt.tools.commands.texts.generate import generate
from specrt.tools.commands.texts.serve import serve
from specrt.tools.terminal.failure import OneLine
from specrt.tools.terminal.process import run_specrt


class _Cli(OneLine, click.Group):
    """The group of all commands."""


@click.group(cls=_Cli, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "--version", prog_name="specrt")
def main() -> None:
    """Speculative decoding: export a target and a draft, then generate the target's own text faster."""


for _command in (
    export,
    distill,
    build,
    warm,
    generate,
    chat,
    serve,
    batch,
    verify,
    tune,
    bench,
    align,
    plan,
    inspect,
    doctor,
    gpu_check,
    compare,
):
    main.add_command(_command)


def run() -> None:
    """The entry point when this file is run directly."""
    run_specrt()


if __name__ == "__main__":
    run()
