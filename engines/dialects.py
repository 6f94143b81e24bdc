"""Which dialects a backend runs, and which one each version of TensorRT's ONNX parser reads."""

from __future__ import annotations

from specrt.engines.contract import DIALECTS, STANDARD_22_DIALECT, STANDARD_DIALECT
from specrt.engines.errors import UsageError

# The oldest version that reads each dialect. 10.14 has Attention, but no TensorScatter.
TENSORRT_DIALECTS = {(10, 3): STANDARD_22_DIALECT, (10, 15): STANDARD_DIALECT}


def dialects_of(backend: str) -> tuple[str, ...]:
    """The dialects that ``backend`` runs, that of its current version first; empty if the backend is not known."""
    if backend not in DIALECTS:
        return ()
    dialect = DIALECTS[backend]
    return (dialect, STANDARD_22_DIALECT) if dialect == STANDARD_DIALECT else (dialect,)


def fits(backend: str, dialect: str) -> bool:
    """Whether ``backend`` runs ``dialect``. A backend that is not known, a later specrt's, may run any that is."""
    known = {name for each in DIALECTS for name in dialects_of(each)}
    return dialect in (dialects_of(backend) or known)


def oldest_version(dialect: str) -> str:
    """The oldest TensorRT that reads ``dialect``, as in ``10.15``."""
    return next(f"{major}.{minor}" for (major, minor), name in TENSORRT_DIALECTS.items() if name == dialect)


def dialect_of_tensorrt(version: str) -> str:
    """The dialect for TensorRT ``version``, as in ``10.3`` or ``10.16.2``. Raises ``UsageError`` for an older one."""
    numbers = version.split(".")
    if len(numbers) < 2 or not all(part.isascii() and part.isdigit() for part in numbers):
        raise UsageError(f"--tensorrt-version {version}: expected numbers, as in 10.3 or 10.16.2")
    wanted = (int(numbers[0]), int(numbers[1]))
    fitting = [dialect for oldest, dialect in TENSORRT_DIALECTS.items() if oldest <= wanted]
    if not fitting:
        oldest = ".".join(map(str, min(TENSORRT_DIALECTS)))
        raise UsageError(f"--tensorrt-version {version}: expected {oldest} or later; JetPack 6.1 has {oldest}")
    return fitting[-1]
