"""The library onnxruntime, whose absence is an error in one line."""

from __future__ import annotations

from specrt.engines.errors import BackendError

try:
    import onnxruntime as ort
except ImportError as error:
    raise BackendError(
        "backend onnxruntime: the library onnxruntime is not installed; install it with 'pip install \"specrt[cpu]\"'"
    ) from error

__all__ = ["ort"]
