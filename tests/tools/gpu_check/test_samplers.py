"""The samplers' experiment on a simulated GPU, and what it says of the library's own ArgMax."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import onnxruntime as ort
import pytest

from specrt.engines.contract import LOGITS, Contract
from specrt.engines.trt.profiles import profiles_of
from specrt.engines.trt.record import EngineEntry
from specrt.tools.gpu_check.experiment import FAILED, PASSED
from specrt.tools.gpu_check.experiments import argmax
from specrt.tools.gpu_check.experiments.samplers import check_samplers
from specrt.tools.gpu_check.kit import Kit
from tests.engines.gpu.simulated_gpu import SimulatedGpu
from tests.engines.trt.simulated_trt import IExecutionContext
from tests.tools.gpu_check.performing import performed, view


def build_alone(simulated: SimulatedGpu, backend: str, bundle: Path, graph: str, contract: Contract) -> EngineEntry:
    """As ``specrt.engines.trt.build.build_alone``: an engine that names its graph."""
    simulated.contracts[str(bundle / graph)] = contract
    profiles = profiles_of(contract)
    content = json.dumps({"graph": str(bundle / graph), "profiles": profiles})
    (bundle / "engines" / backend / "argmax.engine").write_text(content)
    return EngineEntry("argmax.engine", {graph: ""}, "float32", profiles, len(content), "", 0.0)


def test_the_graph_of_one_argmax() -> None:
    session = ort.InferenceSession(argmax.ARGMAX, providers=["CPUExecutionProvider"])
    logits = argmax._ties()
    (found,) = session.run(["ids"], {"logits": logits})
    assert found.tolist() == logits.argmax(axis=-1).tolist()
    assert [found[row] for row in (4, 5, 6, 7)] == [0, 7, 2047, 0]


def test_samplers_are_those_of_numpy(simulated: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(standard=simulated.bundle)
    verdict, reason, figures = performed(check_samplers, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    assert isinstance(figures[simulated.backend]["ArgMax of the library"], str), "the simulation builds no engines"
    monkeypatch.setattr(argmax, "build_alone", functools.partial(build_alone, simulated))
    verdict, reason, figures = performed(check_samplers, kit)
    assert (verdict, reason) == (PASSED, ""), reason
    found = figures[simulated.backend]["ArgMax of the library"]
    assert found["rows with ties"] == 7 > found["of which name the first"], "ties are broken at random"
    differences = figures[simulated.backend]["largest difference"]
    assert differences["match: tokens"] == 0
    assert 0 < differences["softmax: probs"] < 2e-6
    execute = IExecutionContext.execute_async_v3

    def last_of_ties(self: IExecutionContext, stream: int) -> bool:
        """A library whose ArgMax returns the last of equal values: the ids of reversed logits."""
        done = execute(self, stream)
        if self.engine.graph.endswith("match.onnx"):
            address, rows = self.addresses["tokens"], self.shapes["row_indices"][0]
            vocab = self.engine.contract.inputs[0].shape[1]
            assert isinstance(vocab, int)
            logits = view(self.addresses[LOGITS], (rows, vocab), "float32")
            tokens = view(address, (rows,), "int64")

            def reverse() -> None:
                tokens[:] = vocab - 1 - logits[:, ::-1].argmax(axis=-1)

            simulated.cuda.enqueue(reverse)
        return done

    monkeypatch.setattr(IExecutionContext, "execute_async_v3", last_of_ties)
    verdict, reason, _ = performed(check_samplers, kit)
    assert verdict == FAILED
    assert f"{simulated.backend}: match: tokens of case" in reason
