"""``specrt verify`` on bundles of every kind of draft, down to K = 1, and on faults that it must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import specrt
from specrt.engines.manifest import manifest_from_bundle
from specrt.runtime.model import KVCachedModel
from specrt.runtime.target import Target
from specrt.tools.prompting.prompts import encode_own_or_ours
from specrt.tools.verify.certificate import CHECKS, NUM_PROMPTS, certify
from specrt.tools.verify.checks import Check, Subject, check_greedy, check_rows, check_seeds, check_self_draft
from tests.exports import Exports
from tests.progress import KeptProgress

NUM_TOKENS = 12


@pytest.mark.parametrize(
    ("draft", "k", "quantize"),
    [
        ("self:int4", 4, "none"),
        pytest.param("self:int8", 1, "none", marks=pytest.mark.slow),
        pytest.param("ngram", 4, "int8", marks=pytest.mark.slow),
    ],
)
def test_healthy_bundles_pass_and_each_check_is_reported(
    draft: str, k: int, quantize: str, exports: Exports, tmp_path: Path
) -> None:
    bundle = exports.bundle(exports.model(), draft, k, quantize=quantize, prefill_chunk=64)
    kept = KeptProgress()
    found = certify(bundle, max_new_tokens=NUM_TOKENS, num_draws=1000, output=tmp_path / "c.json", progress=kept)
    assert [check.name for check in found.checks if not check.passed] == []
    assert kept.steps == [name for name, _ in CHECKS]
    assert len(kept.notes) == 8 and all(": passed, after" in line for line in kept.notes)
    assert {"chi-square: block", "self-draft", "caches"} <= {check.name for check in found.checks}


def failed(bundle: Path, *checks: Callable[[Subject], list[Check]]) -> set[str]:
    """The names of those of ``checks`` that fail."""
    prompts = encode_own_or_ours(None, bundle, manifest_from_bundle(bundle), NUM_TOKENS + 8, NUM_PROMPTS)
    with specrt.load(bundle) as runtime:
        subject = Subject(bundle, runtime, prompts, NUM_TOKENS, 1000)
        return {check.name for run in checks for check in run(subject) if not check.passed}


def test_a_draft_s_cache_off_by_one_is_found(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output stays right, so only the target as its own draft can show it."""
    assert failed(tiny_bundle, check_self_draft) == set()
    missing = KVCachedModel.missing

    def skips(self: KVCachedModel, committed: list[int]) -> Sequence[int]:
        ids = missing(self, committed)
        return ids[1:] if len(ids) == 2 else ids

    monkeypatch.setattr(KVCachedModel, "missing", skips)
    assert failed(tiny_bundle, check_rows, check_greedy) == set()
    assert failed(tiny_bundle, check_self_draft) == {"self-draft"}


def test_a_rule_that_accepts_everything_is_found(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = exports.bundle(exports.model(), "self:int4", prefill_chunk=64)
    verify = Target.verify

    def lenient(self: Target, committed: list[int], drafted: list[int], *more: bool) -> tuple[int, int]:
        return len(drafted), verify(self, committed, drafted, *more)[1]

    monkeypatch.setattr(Target, "verify", lenient)
    assert {"greedy: model, K = 4", "seed-exact: T = 0.7"} <= failed(bundle, check_rows, check_greedy, check_seeds)
