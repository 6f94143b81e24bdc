"""specrt: speculative decoding on ONNX bundles. ``specrt.load(bundle)`` opens one; nothing heavy is imported before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrt.engines.errors import SpecrtError as SpecrtError
    from specrt.runtime.result import Result as Result
    from specrt.runtime.runtime import Runtime as Runtime
    from specrt.runtime.runtime import load as load

__version__ = "0.1.0"
__all__ = ["Result", "Runtime", "SpecrtError", "__version__", "load"]

_HOME = {
    "load": "specrt.runtime.runtime",
    "Runtime": "specrt.runtime.runtime",
    "Result": "specrt.runtime.result",
    "SpecrtError": "specrt.engines.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'specrt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
