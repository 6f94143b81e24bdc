"""Benches of real methods: their ids, what does not fit, the passes, the tokens that the time allows."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import DraftEntry, manifest_from_bundle
from specrt.tools.bench.bench import described, run_bench
from specrt.tools.bench.methods import (
    choose_methods,
)
from specrt.tools.bench.records import Bench, Settings
from specrt.tools.bench.tables import remarks
from specrt.tools.bench.work import tokens_within
from specrt.tools.prompting.prompts import Prompt
from tests.progress import KeptProgress
from tests.tools.bench.benches import MACHINE, PROMPTS


@pytest.mark.parametrize(
    ("names", "one_at_a_time"),
    [
        pytest.param("eager,plain,model", False, marks=pytest.mark.slow),
        ("eager,assisted,lookup,plain,ngram,model", True),
    ],
)
def test_every_method_gives_the_ids_of_transformers(tiny_bundle: Path, names: str, one_at_a_time: bool) -> None:
    methods = choose_methods(names, manifest_from_bundle(tiny_bundle))
    settings = Settings(4, 1, max_new_tokens=24, repeats=2, ignore_eos=True, one_at_a_time=one_at_a_time)
    kept = KeptProgress()
    bench = run_bench(tiny_bundle, methods, PROMPTS, settings, MACHINE, kept)
    assert [(row.method, row.equal_prompts) for row in bench.scores] == [(c.name, 2) for c in methods]
    assert {row.completion_tokens for row in bench.scores} == {48}
    assert sum(step.startswith("loading") for step in kept.steps) == 1 + one_at_a_time
    assert len(bench.processes) == (2 if one_at_a_time else 3)
    model = bench.scores[-1]
    assert model.acceptance_by_position == (1.0,) * 4  # the draft is the target itself
    assert min(row.peak_bytes for row in bench.scores) > 20 << 20
    assert all(0 < row.first_token_ms < row.seconds * 1e3 for row in bench.scores)
    stored = json.loads(json.dumps(bench.as_dict()))
    assert stored["scores"][0]["method"] == "eager"


def test_the_pair_is_named_with_its_weights(tiny_bundle: Path) -> None:
    manifest = manifest_from_bundle(tiny_bundle)
    target = replace(manifest.target, source="/models/big.gguf", quantization="int8")
    small = replace(target, source="/models/small", quantization="int4")
    cut = replace(target, quantization="none", spec=replace(target.spec, kv_layers=target.spec.kv_layers[:1]))
    drafts = {
        "ngram": DraftEntry("ngram", None),
        "itself": DraftEntry("self", None),
        "itself (float32, int4, on the target's KV)": DraftEntry("model", small, shares_kv=True),
        "small (float32, int4)": DraftEntry("model", small),
        "1 of its 2 layers (float32)": DraftEntry("model", cut),
    }
    for name, draft in drafts.items():
        assert described(replace(manifest, target=target, draft=draft)) == f"big.gguf (float32, int8), draft {name}"


@pytest.mark.slow
@pytest.mark.parametrize("names", ["eager-bf16,plain", "eager,eager-bf16,assisted-bf16,plain"])
def test_bf16_and_another_source_are_distinguished(names: str, tiny_bundle: Path, tmp_path: Path) -> None:
    """The torch model may be elsewhere; in bf16 ids may differ, which is reported and no failure."""
    elsewhere = tmp_path / "moved"
    elsewhere.symlink_to(manifest_from_bundle(tiny_bundle).target.source)
    methods = choose_methods(names, manifest_from_bundle(tiny_bundle))
    settings = Settings(4, 1, max_new_tokens=12, repeats=1, sources={"target": str(elsewhere)})
    bench = run_bench(tiny_bundle, methods, PROMPTS, settings, MACHINE)
    assert [row.method for row in bench.scores] == names.split(",") and bench.failed == {}
    assert bench.started["eager-bf16"]["dtype"] == "torch.bfloat16"
    assert bench.scores[0].equal_prompts == 2
    if "eager," in names:
        assert bench.scores[-1].equal_prompts == 2
    moved = Settings(4, 1, max_new_tokens=12, repeats=1, sources={"target": str(tmp_path / "none")})
    with pytest.raises(SpecrtError, match=r"transformers (fp32|bf16): .*none"):
        run_bench(tiny_bundle, methods, PROMPTS, moved, MACHINE)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU; no g++ found")
@pytest.mark.slow
def test_a_compiled_eager_gives_the_same_ids(tiny_bundle: Path) -> None:
    methods = choose_methods("eager-compiled,plain", manifest_from_bundle(tiny_bundle))
    bench = run_bench(tiny_bundle, methods, PROMPTS, Settings(4, 1, max_new_tokens=12, repeats=1), MACHINE)
    assert [row.equal_prompts for row in bench.scores] == [2, 2]
    assert bench.started["eager-compiled"]["compiled"] is True


def test_sampled_text_is_the_same_with_and_without_drafts(benched: Bench) -> None:
    assert [row.equal_prompts for row in benched.scores] == [2, 2, 2]


def test_what_does_not_fit_is_left_out_with_a_note(benched: Bench) -> None:
    assert [entry.name for entry in benched.prompts] == ["a", "b"]
    assert any("prompt huge: its" in line for line in remarks(benched))


def test_passes_are_timed(benched: Bench) -> None:
    passes = benched.passes
    assert passes is not None
    assert (len(passes.target_ms), set(passes.break_even_by_k)) == (5, {1, 2, 3, 4})
    assert passes.draft_ms > 0


def test_tokens_follow_from_the_time() -> None:
    assert tokens_within(64, None, [1.0], 12) == 64
    assert tokens_within(64, 600, [0.02, 0.05], 12) == 64
    assert tokens_within(64, 61, [0.05, 0.05], 12) == 40
    assert tokens_within(64, 1, [0.05], 12) == 16
    assert tokens_within(8, 1, [0.05], 12) == 8


def test_k_beyond_the_bundle_is_refused_before_anything_is_loaded(tiny_bundle: Path) -> None:
    kept = KeptProgress()
    methods = choose_methods("plain", manifest_from_bundle(tiny_bundle))
    with pytest.raises(UsageError, match="k: got 5, this bundle was exported for 1 to 4"):
        run_bench(tiny_bundle, methods, [Prompt("a", "a")], Settings(5, 1), MACHINE, kept)
    assert kept.steps == []
