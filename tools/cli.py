"""The ``specrt`` command: a group whose commands are in ``specrt.tools.commands``, one file each."""

from __future__ import annotations

import click

from specrt import __version__
from specrt.tools.commands.align import align
from specrt.tools.commands.bench import bench
from specrt.tools.commands.build import build
from specrt.tools.commands.chat import chat
from specrt.tools.commands.compare import compare
from specrt.tools.commands.doctor import doctor
from specrt.tools.commands.export import export
from specrt.tools.commands.generate import generate
from specrt.tools.commands.gpu_check import gpu_check
from specrt.tools.commands.inspect import inspect
from specrt.tools.commands.plan import plan
from specrt.tools.commands.serve import serve
from specrt.tools.commands.tune import tune
from specrt.tools.commands.verify import verify
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
    build,
    generate,
    chat,
    serve,
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
