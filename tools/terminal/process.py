"""The process of a command: streams that never fail with a traceback, a home folder, signals, and the exit code.

Imports little, so that Ctrl-C is reported in one line while the rest is imported.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from specrt.engines.storage.home import provide_home
from specrt.tools.terminal.hugepages import restart_with_huge_pages
from specrt.tools.terminal.streams import flush_streams, give_up_streams, protect_streams

_STOPPING = ("SIGTERM", "SIGHUP")
_RESTARTING = frozenset({"generate", "chat", "serve", "verify", "tune", "align"})


def run_specrt() -> NoReturn:
    """The entry point of ``specrt``. Generation restarts once, so that its weights are on huge pages."""
    run_process(_load_specrt, restarts=sys.argv[1:2] != [] and sys.argv[1] in _RESTARTING)


def _load_specrt() -> Callable[[], object]:
    from specrt.tools.cli import main

    return main


def run_process(load: Callable[[], Callable[[], object]], restarts: bool = False) -> NoReturn:
    """Import by ``load`` and run what it returns; end the process with its exit code.

    ``restarts``: restart once, so that weights are on huge pages (``specrt.tools.terminal.hugepages``).
    """
    if restarts:
        restart_with_huge_pages()
    code = _exit_code(lambda: _run(load))
    code = code or _exit_code(flush_streams)
    give_up_streams()
    for name in ("SIGINT", *_STOPPING):  # nothing is left that a signal could interrupt
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.exit(code)


def _run(load: Callable[[], Callable[[], object]]) -> None:
    _prepare()
    load()()


def _prepare() -> None:
    protect_streams()
    warnings.showwarning = _show_warning
    for name in _STOPPING:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, _stop)
    provide_home()


def _exit_code(action: Callable[[], object]) -> int:
    try:
        action()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        from specrt.tools.terminal.failure import report

        return report(error)
    return 0


def _stop(number: int, _: Any) -> None:
    from specrt.tools.terminal.failure import Stopped

    raise Stopped(number)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"specrt: warning: {' '.join(str(message).split())}", file=sys.stderr)
