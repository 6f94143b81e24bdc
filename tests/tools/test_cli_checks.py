"""``specrt verify`` and ``specrt inspect``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from specrt.engines.storage import integrity
from specrt.runtime.target import Target
from tests.tools.commands import invoke, one_error_line

SHORT = ("--max-new-tokens", 8, "--num-draws", 1000)


def test_verify_certifies_a_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    model = tiny_bundle.parent / "model"
    result = invoke("verify", tiny_bundle, "--source", model, *SHORT, "--output", file, "--json")
    assert result.exit_code == 0, result.output
    certificate = json.loads(result.stdout)
    assert certificate == json.loads(file.read_text())
    assert certificate["bundle"] == tiny_bundle.name and str(tiny_bundle.parent) not in result.stdout
    assert certificate["passed"] is True
    assert certificate["sources_compared"] == ["target"] and certificate["checks"][0]["name"] == "source: target"
    assert {check["passed"] for check in certificate["checks"]} == {True}


def test_verify_exits_with_1_and_names_what_failed(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that gives another id after two or more drafted ones, which rounding does not explain."""
    verify = Target.verify

    def forked(self: Target, committed: Sequence[int], drafted: Sequence[int], *more: bool) -> tuple[int, int]:
        accepted, token = verify(self, committed, drafted, *more)
        return (accepted, (token + 1) % 300) if len(drafted) > 1 else (accepted, token)

    monkeypatch.setattr(Target, "verify", forked)
    file = tmp_path / "certificate.json"
    result = invoke("verify", tiny_bundle, *SHORT, "--output", file)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("specrt: error: ")
    assert "checks failed: greedy: model, K = 2, greedy: model, K = 4" in last
    assert "greedy: model, K = 1," not in last
    assert json.loads(file.read_text())["passed"] is False
    assert "the weights were not compared with the model's files; --source TARGET does it" in result.stdout
    assert json.loads(file.read_text())["sources_compared"] == []


def test_a_certificate_that_cannot_be_written_is_refused_before_any_check(tiny_bundle: Path, tmp_path: Path) -> None:
    result = invoke("verify", tiny_bundle, "--output", tmp_path / "no" / "file")
    assert result.exit_code == 2
    assert "the certificate cannot be written there" in one_error_line(result)


def test_inspect_prints_tables_or_one_object(tiny_bundle: Path) -> None:
    assert "target" in invoke("inspect", tiny_bundle).stdout
    data = json.loads(invoke("inspect", tiny_bundle, "--json", "--check").stdout)
    assert (data["num_speculative_tokens"], data["draft"]["kind"]) == (4, "self")
    assert data["derived"]["target"]["kv_bytes_per_sequence"] > 0


def test_what_takes_long_to_hash_is_shown(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "LONG_BYTES", 1)
    result = invoke("inspect", tiny_bundle, "--json", "--check")
    assert result.stderr.startswith("hashing 0.0 GB: ") and json.loads(result.stdout)["draft"]["kind"] == "self"
