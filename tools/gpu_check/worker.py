"""One experiment in a process of its own: ``python -m specrt.tools.gpu_check.worker MODULE:FUNCTION KIT RESULT``.

A crash of a library, or a hang, ends this process and no other experiment. The figures are in the file RESULT.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from specrt.tools.gpu_check.experiment import Notes, perform
from specrt.tools.gpu_check.kit import kit_in


def work(function: str, kit: str, result: str) -> None:
    """Perform the experiment whose ``run`` is ``function`` and write its verdict."""
    module, _, name = function.partition(":")
    notes = Notes(Path(result))
    notes.write(*perform(getattr(import_module(module), name), kit_in(Path(kit)), notes))


if __name__ == "__main__":
    work(*sys.argv[1:])
