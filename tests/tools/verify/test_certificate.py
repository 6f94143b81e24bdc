"""``specrt verify`` on bundles of every kind of draft, down to K = 1, and on faults that it must find."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.runtime.sampling.verifier import Verifier
from specrt.runtime.target import Draft
from specrt.tools.verify.certificate import Certificate, certify
from tests.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("certificate") / "model")


def certificate(bundle: Path, lines: list[str] | None = None) -> Certificate:
    reported = lines if lines is not None else []
    return certify(bundle, max_new_tokens=12, num_draws=1500, output=bundle.parent / "c.json", report=reported.append)


def failed(found: Certificate) -> list[str]:
    return [check.name for check in found.checks if not check.passed]


@pytest.mark.parametrize(("draft", "k"), [("ngram", 1), ("self:int8", 1), ("self:int4", 3)])
def test_healthy_bundles_pass_and_each_check_is_reported(draft: str, k: int, model: Path, tmp_path: Path) -> None:
    export(ExportOptions(str(model), tmp_path / "b", draft, k))
    lines: list[str] = []
    found = certificate(tmp_path / "b", lines)
    assert failed(found) == []
    assert len(lines) == 8 and all(": passed, after" in line for line in lines)
    assert {"chi-square: token", "chi-square: block", "self-draft", "caches"} <= {check.name for check in found.checks}


def test_a_draft_s_cache_off_by_one_is_found(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output stays right, so only the target as its own draft can show it."""
    pending = Draft._pending

    def skips(self: Draft, committed: list[int], drafted: list[int]) -> list[int]:
        ids = pending(self, committed, drafted)
        return ids[1:] if len(ids) == 2 else ids

    monkeypatch.setattr(Draft, "_pending", skips)
    assert "self-draft" in failed(certificate(tiny_bundle))


def test_a_rule_that_accepts_everything_is_found(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(ExportOptions(str(model), tmp_path / "b", "self:int4", 3))
    verifier = Verifier.verify

    def lenient(
        self: Verifier, width: int, rows: int, committed: list[int], drafted: list[int], *more: bool
    ) -> tuple[int, int]:
        return len(drafted), verifier(self, width, rows, committed, drafted, *more)[1]

    monkeypatch.setattr(Verifier, "verify", lenient)
    assert {"greedy: model, K = 3", "seed-exact: T = 0.7"} <= set(failed(certificate(tmp_path / "b")))
