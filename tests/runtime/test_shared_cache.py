"""A draft that is the target with other weights reads the target's cache: it is fed no prompt, and harms nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt.engines.buffers import plan_slot
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.options import ExportOptions
from specrt.runtime.model import KVCachedModel
from specrt.runtime.runtime import Runtime
from tests.exports import Exports

PROMPT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def bundle(exports: Exports) -> Path:
    return exports.bundle(exports.model(), "self:int8", prefill_chunk=64)


@pytest.fixture(scope="module")
def copies(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with the target's very weights, set to share its cache."""
    model, place = exports.model(), tmp_path_factory.mktemp("shared") / "copies"
    shutil.copytree(exports.bundle(model, str(model), prefill_chunk=64), place)
    path = place / "bundle.json"
    manifest = json.loads(path.read_text())
    manifest["draft"]["shares_kv"] = True
    path.write_text(json.dumps(manifest))
    return place


def passes_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KVCachedModel, int]]:
    """Every pass from now on: the model, and how many ids it was fed."""
    passes: list[tuple[KVCachedModel, int]] = []
    feed = KVCachedModel.feed

    def note(self: KVCachedModel, ids: Any, *rest: Any) -> tuple[int, int]:
        passes.append((self, len(ids)))
        return feed(self, ids, *rest)

    monkeypatch.setattr(KVCachedModel, "feed", note)
    return passes


def test_export_reports_that_the_cache_is_shared(bundle: Path, copies: Path) -> None:
    manifest = manifest_from_bundle(bundle)
    assert manifest.draft.kind == "model" and manifest.draft.shares_kv
    plan = {buffer.name: buffer for buffer in plan_slot(manifest, "onnxruntime")}
    assert plan["draft/past_key.0"].alias == "target/past_key.0"
    assert plan["draft/logits"].alias is None


def test_a_draft_with_the_target_s_weights_has_all_accepted_and_is_fed_no_prompt(
    copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with specrt.load(copies, threads=1) as runtime:
        passes = passes_of(monkeypatch)
        result = runtime.generate(PROMPT, max_new_tokens=40, draft="model", num_speculative_tokens=3)
        stats = result.stats
        assert stats.drafted > 0 and stats.accepted == stats.drafted
        drafts = [fed for model, fed in passes if model is not passes[0][0]]
        assert drafts and set(drafts) == {1}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("draft", ["model", "auto"])
def test_the_text_is_the_target_s_own(bundle: Path, draft: str, k: int) -> None:
    with specrt.load(bundle, threads=1) as runtime:
        plain = runtime.generate(PROMPT, max_new_tokens=60, draft="none", reproducible=True)
        for _ in range(3):  # the later ones find the slot as the earlier ones left it
            options: dict[str, Any] = {"num_speculative_tokens": k} if draft == "model" else {}
            drafted = runtime.generate(PROMPT, max_new_tokens=60, draft=draft, reproducible=True, **options)
            assert drafted.token_ids == plain.token_ids
        assert draft == "auto" or drafted.stats.accepted > 0


@pytest.mark.parametrize("rule", ["match", "block"])
def test_every_rule_runs_and_seeds_decide(bundle: Path, rule: str) -> None:
    with specrt.load(bundle, threads=1) as runtime:
        options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "seed": 5, "rule": rule}
        first, second = (
            runtime.generate(PROMPT, draft="model", num_speculative_tokens=3, reproducible=True, **options)
            for _ in range(2)
        )
        assert first.token_ids == second.token_ids
        if rule == "match":
            plain = runtime.generate(PROMPT, draft="none", reproducible=True, **options)
            assert first.token_ids == plain.token_ids


def test_a_slot_for_measurements_has_a_cache_of_its_own(bundle: Path) -> None:
    with Runtime(bundle, threads=1) as runtime:
        slot = runtime.open_slot("model")
        assert slot.draft is not None
        name = "past_key.0"
        assert slot.draft.model.binding.memory[name] is not slot.target.model.binding.memory[name]
        slot.close()


def test_only_a_draft_of_the_target_s_own_weights_shares_its_cache() -> None:
    assert not ExportOptions("model", Path("b"), "model").shares_kv
    assert not ExportOptions("model", Path("b"), "self").shares_kv
    assert ExportOptions("model", Path("b"), "self:int4").shares_kv
