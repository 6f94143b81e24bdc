"""Which bundles are served with ``reproducible``: those whose pass of one row rounds differently from wider ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from specrt.engines.contract import LOGITS
from specrt.engines.fake import FakeEngine
from specrt.engines.interface import Array
from specrt.runtime.runtime import load
from specrt.serving.rounding import needs_reproducible


def test_a_pass_of_one_row_that_rounds_otherwise_is_found(parrot_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(parrot_bundle) as runtime:
        assert not needs_reproducible(runtime)
    compute = FakeEngine.compute

    def rounding(self: FakeEngine, host: Mapping[str, Array], width: int, rows: int) -> None:
        compute(self, host, width, rows)
        if width == 1:
            host[LOGITS][:rows] += 1e-2

    monkeypatch.setattr(FakeEngine, "compute", rounding)
    with load(parrot_bundle) as runtime:
        assert needs_reproducible(runtime)
        runtime_idle = runtime.num_idle_slots
        assert runtime_idle == 0  # the slot that it looked with is gone
