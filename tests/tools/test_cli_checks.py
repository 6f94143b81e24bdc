"""``specrt verify`` and ``inspect``, and the tool that compares ids with torch's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from specrt.engines.storage import integrity
from specrt.runtime.target import Target
from specrt.tools.lab import identity
from tests.tools.commands import invoke, one_error_line


def test_verify_certifies_a_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    model = tiny_bundle.parent / "model"
    result = invoke("verify", tiny_bundle, "--source", model, "--max-new-tokens", 8, "--output", file, "--json")
    assert result.exit_code == 0, result.output
    certificate = json.loads(result.stdout)
    assert certificate == json.loads(file.read_text())
    assert certificate["passed"] is True
    assert certificate["sources_compared"] == ["target"] and certificate["checks"][0]["name"] == "source: target"
    assert {check["passed"] for check in certificate["checks"]} == {True}


def test_verify_exits_with_1_and_names_what_failed(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that says another id after two drafted ones or more, which no rounding explains."""
    verify = Target.verify

    def forked(self: Target, committed: Sequence[int], drafted: Sequence[int], *more: bool) -> tuple[int, int]:
        accepted, token = verify(self, committed, drafted, *more)
        return (accepted, (token + 1) % 300) if len(drafted) > 1 else (accepted, token)

    monkeypatch.setattr(Target, "verify", forked)
    file = tmp_path / "certificate.json"
    result = invoke("verify", tiny_bundle, "--max-new-tokens", 8, "--output", file)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("specrt: error: ")
    assert "checks failed: greedy: model, K = 2, greedy: model, K = 4" in last
    assert "greedy: model, K = 1," not in last
    assert json.loads(file.read_text())["passed"] is False
    assert "the weights were not compared with the model's files; --source TARGET does it" in result.stdout
    assert json.loads(file.read_text())["sources_compared"] == []


def test_a_certificate_that_cannot_be_written_is_told_before_any_check(tiny_bundle: Path, tmp_path: Path) -> None:
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


def test_identity_finds_every_way_equal(tiny_bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    options = ["--max-new-tokens", "12", "--k", "1,4", "--prompts", "2", "--json", str(file)]
    result = CliRunner().invoke(identity.main, [str(tiny_bundle), *options])
    assert result.exit_code == 0, result.output
    checks = json.loads(file.read_text())["checks"]
    ways = [("none", 0), ("ngram", 1), ("ngram", 4), ("model", 1), ("model", 4)]
    assert [(check["draft"], check["k"], check["num_equal"]) for check in checks] == [(*way, 2) for way in ways]


def test_identity_exits_with_1_on_a_fork(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "eager_ids", lambda bundle, ids, ways, advance: [(1, 2)] * len(ids))
    options = ["--max-new-tokens", "2", "--k", "4", "--drafts", "ngram", "--prompts", "1"]
    result = CliRunner().invoke(identity.main, [str(tiny_bundle), *options])
    assert result.exit_code == 1
    assert re.search(r"^ngram, K = 4 forks in chat, position \d: expected id \d", result.stdout, re.MULTILINE)
    told = result.stderr.splitlines()
    assert told[:2] == ["plain: 0 of 1 prompts the same", "ngram, K = 4: 0 of 1 prompts the same"]
    assert told[2].startswith("specrt: error: 2 of 2 texts are not the target's own")
    assert len(told) == 3


@pytest.mark.parametrize("options", [["--k", "5"], ["--k", "0"], ["--k", "a"], ["--drafts", "oracle"]])
def test_identity_refuses_what_the_bundle_does_not_have(tiny_bundle: Path, options: list[str]) -> None:
    result = CliRunner().invoke(identity.main, [str(tiny_bundle), *options])
    assert result.exit_code == 2
    assert "this bundle" in one_error_line(result)
