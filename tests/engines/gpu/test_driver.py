"""CUDA's answers as ``RealCuda`` takes them, by a stub of ``cuda.bindings.runtime`` that counts what is alive.

A real driver is in ``test_contract.py``, which cannot make each of these calls fail.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specrt.engines.errors import BackendError
from specrt.engines.gpu.driver import RealCuda

runtime = pytest.importorskip("cuda.bindings.runtime")
OK, FAILED = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorStreamCaptureInvalidated
NOT_READY, INVALID = runtime.cudaError_t.cudaErrorNotReady, runtime.cudaError_t.cudaErrorInvalidResourceHandle


class Stub:
    """Answers with a status first, as the bindings do. ``alive`` are graphs that were not destroyed."""

    cudaError_t = runtime.cudaError_t
    cudaMemcpyKind = runtime.cudaMemcpyKind
    cudaStreamCaptureMode = runtime.cudaStreamCaptureMode
    cudaDeviceAttr = runtime.cudaDeviceAttr
    cudaStreamNonBlocking = runtime.cudaStreamNonBlocking

    def __init__(self, end: Any = OK, instantiate: Any = OK, elapsed: Any = OK) -> None:
        self.end, self.instantiate, self.elapsed = end, instantiate, elapsed
        self.alive: set[int] = set()
        self.last_error = OK

    def cudaStreamEndCapture(self, stream: int) -> tuple[Any, Any]:
        if self.end != OK:
            self.last_error = self.end
            return self.end, runtime.cudaGraph_t(0)
        self.alive.add(11)
        return OK, runtime.cudaGraph_t(11)

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, Any]:
        self.last_error = self.instantiate
        return self.instantiate, 22

    def cudaGraphDestroy(self, graph: Any) -> tuple[Any]:
        self.alive.remove(int(graph))
        return (OK,)

    def cudaGetLastError(self) -> tuple[Any]:
        said, self.last_error = self.last_error, OK
        return (said,)

    def cudaEventElapsedTime(self, first: int, last: int) -> tuple[Any, float]:
        self.last_error = self.elapsed
        return self.elapsed, 1.5

    def cudaGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return OK, b"invalid resource handle"

    def cudaGetDeviceProperties(self, ordinal: int) -> tuple[Any, Any]:
        return OK, SimpleNamespace(name=b"stub\0")

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (OK, 1)


def opened(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> tuple[RealCuda, Stub]:
    stub = Stub(**answers)
    monkeypatch.setattr("cuda.bindings.runtime", stub)
    return RealCuda(), stub


def raises() -> bool:
    raise KeyError("of the library")


CAPTURES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "all well": ({}, lambda: True, 22),
    "the library says no": ({}, lambda: False, None),
    "the library raises": ({}, raises, KeyError),
    "the capture is invalid": ({"end": FAILED}, lambda: True, None),
    "it cannot be instantiated": ({"instantiate": FAILED}, lambda: True, None),
}


@pytest.mark.parametrize("case", CAPTURES)
def test_a_capture_leaves_no_graph_and_no_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, enqueue, expected = CAPTURES[case]
    cuda, stub = opened(monkeypatch, **answers)
    if expected is KeyError:
        with pytest.raises(KeyError):
            cuda.capture(enqueue)
    else:
        assert cuda.capture(enqueue) == expected
    assert (stub.alive, stub.last_error) == (set(), OK)


def test_an_event_that_is_not_ready_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, stub = opened(monkeypatch, elapsed=NOT_READY)
    assert (cuda.elapsed_ms(1, 2), stub.last_error) == (None, OK)
    assert opened(monkeypatch)[0].elapsed_ms(1, 2) == 1.5
    cuda, _ = opened(monkeypatch, elapsed=INVALID)
    with pytest.raises(BackendError, match=r"cudaEventElapsedTime failed \(invalid resource handle\)"):
        cuda.elapsed_ms(1, 2)
