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

A command that a signal stops exits with 128 and the signal's number: 130 for Ctrl-C. One that meets an error which is
not in the tree, a fault of specrt, exits with 70. A message says what is wrong, what was got, what was expected and how
to fix it, in one line.
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
    """An error's text in one line, at most its first ``limit`` characters; its type's name where it has no text."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def kind_and_line(error: BaseException) -> str:
    """Its type's name and its text, as in ``ValueError: not a number``."""
    return f"{type(error).__name__}: {one_line(error)}"


class SpecrtError(Exception):
    """Root of the errors that specrt raises on purpose; ``exit_code`` is the process's exit status."""

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
