"""The error tree. Each leaf has its own process exit code (docs/exit-codes.md is checked against this file).

    SpecrtError                 1
    ├── UsageError              2   an option or a prompt is not acceptable
    ├── SourceError             3   a model to export cannot be found or read
    ├── UnsupportedModelError   4   a model that cannot be exported faithfully
    ├── PairError               5   the draft does not fit the target
    ├── BundleError             6   a bundle is missing, damaged or of another schema
    ├── ParityError             7   an exported graph does not answer as the model does
    ├── ResourceError           8   disk, memory or an output cannot be used
    └── BackendError            9   a backend is unknown or not in the bundle; its library or engines do not fit

A command that is stopped by a signal exits with 128 plus the signal's number: 130 for Ctrl-C. An error that is not in
the tree is a bug in specrt; the command exits with 70. A message states in one line what is wrong, the value that was
got, what was expected, and how to fix it.
"""

from __future__ import annotations

HUNG_UP_EXIT_CODE = 129
INTERRUPTED_EXIT_CODE = 130
TERMINATED_EXIT_CODE = 143
INTERNAL_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
OTHER_EXIT_CODES = {
    "internal error": INTERNAL_EXIT_CODE,
    "hung up": HUNG_UP_EXIT_CODE,
    "interrupted": INTERRUPTED_EXIT_CODE,
    "terminated": TERMINATED_EXIT_CODE,
}


def one_line(error: object, limit: int = 240) -> str:
    """An error's text in one line, cut to ``limit`` characters; the name of its type if it has no text."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """The name of an error's type and its text, as in ``ValueError: not a number``."""
    return f"{type(error).__name__}: {one_line(error)}"


class SpecrtError(Exception):
    """Base class of specrt's errors; ``exit_code`` is the exit status of the process."""

    exit_code = 1


class UsageError(SpecrtError):
    exit_code = 2


class SourceError(SpecrtError):
    exit_code = 3


class UnsupportedModelError(SpecrtError):
    exit_code = 4


class PairError(SpecrtError):
    exit_code = 5


class BundleError(SpecrtError):
    exit_code = 6


class ParityError(SpecrtError):
    exit_code = 7


class ResourceError(SpecrtError):
    exit_code = 8


class BackendError(SpecrtError):
    exit_code = 9


class PlacementWarning(UserWarning):
    """A part of a graph runs on the CPU although the graph was loaded for a GPU."""
