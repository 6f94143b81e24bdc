"""The simulated TensorRT is as strict as it claims: working memory is spoiled, and first runs allocate."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from specrt.engines.contract import LOGITS
from tests.engines.gpu.simulated_cuda import POISON
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.trt.simulated_trt import ICudaEngine, IExecutionContext


def contexts(simulated: SimulatedGpu) -> list[IExecutionContext]:
    return [context for engine in simulated.library.engines for context in engine.contexts if context.runs]


def test_nothing_stays_in_working_memory(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that relied on what its last run left there would read this."""
    session = ICudaEngine.__init__
    before: list[bool] = []

    def watched(self: ICudaEngine, *arguments: object) -> None:
        session(self, *arguments)  # type: ignore[arg-type]
        run = self.session.run_with_iobinding

        class Session:
            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

            def run_with_iobinding(self, io: object) -> None:
                before.extend(is_spoiled(simulated, context) for context in contexts(simulated))
                run(io)

        real, self.session = self.session, Session()

    monkeypatch.setattr(ICudaEngine, "__init__", watched)
    with simulated.open() as runtime:
        runtime.generate([5, 6, 7], max_new_tokens=6, ignore_eos=True)
        used = contexts(simulated)
        assert used and all(is_spoiled(simulated, context) for context in used)
    assert before and all(before)


def is_spoiled(simulated: SimulatedGpu, context: IExecutionContext) -> bool:
    assert context.scratch is not None
    return bool(np.all(simulated.cuda.view(*context.scratch) == POISON))


def test_a_first_run_cannot_be_captured(simulated: SimulatedGpu) -> None:
    """It allocates, which CUDA forbids in a capture; a later one can. So passes are captured on their second run."""
    with simulated.open() as runtime:
        runtime.generate([5, 6, 7], max_new_tokens=6, ignore_eos=True)
        context = next(c for c in contexts(simulated) if c.engine._tensors.keys() >= {LOGITS} and not c.is_captured)
        for runs, is_possible in ((0, False), (1, True)):
            context.runs = runs
            simulated.cuda._capturing = []
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    if is_possible:
                        assert context.execute_async_v3(simulated.cuda.stream)
                    else:
                        with pytest.raises(AssertionError, match="cudaMalloc is not allowed while"):
                            context.execute_async_v3(simulated.cuda.stream)
            finally:
                simulated.cuda._capturing = None
