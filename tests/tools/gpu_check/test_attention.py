"""The experiment on forms of attention, on a simulated GPU: it ranks them by time, and refuses one that is wrong."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.errors import BackendError
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.gpu_check.experiment import FAILED, PASSED, SKIPPED
from specrt.tools.gpu_check.experiments import kernels, places, timing
from specrt.tools.gpu_check.experiments.attention import check_attention
from specrt.tools.gpu_check.forms import FORMS, KIT_FORMS, OPERATOR, RESHAPED, SUMS, Form, Heads, Writer
from specrt.tools.gpu_check.kit import Kit
from specrt.tools.gpu_check.make import _restamp
from specrt.tools.gpu_check.rewrite import rewrite_attention
from tests.engines.gpu.simulated_gpu import SimulatedGpu, write_engines
from tests.engines.trt.simulated_trt import LAYERS, IExecutionContext
from tests.tools.gpu_check.performing import performed

Forms = Callable[..., Kit]


@pytest.fixture
def forms(simulated: SimulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Forms:
    """A kit of the tiny bundle in some forms, with engines; ``name=form`` puts another form in the place of a name."""
    for module in (timing, kernels):
        monkeypatch.setattr(module, "RUNS", 2)
    monkeypatch.setattr(timing, "REPEATS", 1)

    def make(*names: str, **others: Form) -> Kit:
        bundles = {}
        for name in names:
            bundle = Path(shutil.copytree(simulated.bundle, tmp_path / name))
            form = others.get(name, FORMS[KIT_FORMS[name]])
            rewrite_attention(bundle / manifest_from_bundle(bundle).target.graph, form)
            _restamp(bundle)
            shutil.rmtree(bundle / "engines")
            simulated.contracts.update(write_engines(bundle, simulated.backend, simulated.library.__version__, True))
            bundles[f"{name}-96"] = bundle
        return Kit(attention=bundles)

    return make


def test_forms_are_ranked_by_their_time(simulated: SimulatedGpu, forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = IExecutionContext._compute

    def slow(self: IExecutionContext, io: Any) -> None:
        if "sums" in self.engine.graph:
            time.sleep(0.01)
        compute(self, io)

    monkeypatch.setattr(IExecutionContext, "_compute", slow)
    verdict, reason, figures = performed(check_attention, forms("sums", "reshape"))
    assert (verdict, reason) == (PASSED, ""), reason
    label = f"{simulated.backend}, 96 slots"
    assert [name for name in figures if name.startswith(label)] == [f"{label}: {form}" for form in (RESHAPED, SUMS)], (
        "what export writes first, whatever the order of folders"
    )
    ranked = figures["forms, the fastest first"][label]
    assert list(ranked) == [f"width {w} after {s} tokens" for w in (1, 2, 4, 32) for s in (16, 24, 64)]
    assert all(SUMS in order.split(", ")[-1] for order in ranked.values()), ranked
    found = figures[f"{label}: {SUMS}"]
    assert all(ms >= 10 for ms in found["ms"].values())
    assert list(found["time at the full cache over a short one"]) == [f"width {w}" for w in (1, 2, 4, 32)]
    assert found["ms by kernel"]["width 4 after 64 tokens"] == dict.fromkeys(LAYERS, 0.25)


def test_a_form_that_is_wrong_is_named_and_not_ranked(simulated: SimulatedGpu, forms: Forms) -> None:
    def doubled(w: Writer, query: str, key: str, value: str, mask: str, heads: Heads) -> str:
        return FORMS[OPERATOR](w, query, key, value, mask, replace(heads, scale=2 * heads.scale))

    verdict, reason, figures = performed(check_attention, forms("reshape", "operator", operator=doubled))
    assert verdict == FAILED
    assert reason.startswith(f"{simulated.backend}, 96 slots: {OPERATOR}: logits are off by ")
    (ranked,) = figures["forms, the fastest first"].values()
    assert all(OPERATOR not in order.split(" ms")[0].split(", ") for order in ranked.values())


def test_a_form_that_cannot_be_built_leaves_the_others(
    simulated: SimulatedGpu, forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BackendError("no kernel for it")

    monkeypatch.setattr(places, "build", refuse)
    kit = forms("reshape", "matmul")
    (kit.attention["reshape-96"] / "engines" / simulated.backend / "target.engine").unlink()
    verdict, reason, figures = performed(check_attention, kit)
    label = f"{simulated.backend}, 96 slots: {RESHAPED}"
    assert (verdict, reason, figures["not measured"]) == (PASSED, "", {label: "no kernel for it"})
    assert len(figures["forms, the fastest first"]) == 1
    (kit.attention["matmul-96"] / "engines" / simulated.backend / "target.engine").unlink()
    verdict, reason, _ = performed(check_attention, kit)
    assert (verdict, reason) == (SKIPPED, "no kernel for it")


def test_a_library_without_times_of_kernels_is_named(
    simulated: SimulatedGpu, forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(simulated.library, "IProfiler")
    verdict, _, figures = performed(check_attention, forms("reshape"))
    assert verdict == PASSED
    reason = f"{simulated.library.__name__} {simulated.library.__version__} has no IProfiler"
    (found,) = (value for name, value in figures.items() if name.endswith(RESHAPED))
    assert set(found["ms by kernel"].values()) == {reason}
