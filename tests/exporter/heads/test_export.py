"""A head exported with its target: the bundle, rounds against a computation without caches, and the target's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM

import specrt
from specrt.engines.buffers import plan_slot
from specrt.engines.contract import FEATURE_CACHE, FEATURES, LOGITS, UNDRAFTED
from specrt.engines.errors import PairError, UsageError
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.resident import resident_memory
from specrt.engines.storage.integrity import check_files
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.exporter.sources.fingerprint import fingerprint_of
from specrt.exporter.sources.source import find_checkpoint
from specrt.runtime.completion import Completion
from specrt.runtime.result import Stats
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.runtime.slots import Slot
from tests.exporter.heads.oracle import Faults, Rounds, reference_rounds
from tests.exporter.heads.pairs import PROMPTS, HeadPair, K, head_bundle, head_pair, notes_of
from tests.exports import Exports
from tests.progress import KeptProgress
from tests.tools.commands import invoke

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def pair(exports: Exports) -> HeadPair:
    return head_pair(exports)


@pytest.fixture(scope="module")
def bundle(exports: Exports) -> Path:
    return head_bundle(exports)


@pytest.fixture(scope="module")
def target(pair: HeadPair) -> Any:
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()


def rounds_of(
    runtime: Runtime, slot: Slot, prompt: Sequence[int], k: int, draft: str = "model"
) -> tuple[Rounds, list[int]]:
    """((drafted ids, accepted) of each round, the text) of a generation in ``slot``."""
    settings = Settings(NUM_TOKENS, k, draft)
    completion = Completion(prompt, settings, runtime.manifest.target.spec.max_seq_len)
    rounds = [done for done in runtime.rounds(slot, completion, Stats()) if not done.is_prefill]
    return [(list(done.drafted), done.num_accepted) for done in rounds], completion.new_tokens


@pytest.fixture(scope="module")
def runtime(bundle: Path) -> Iterator[Runtime]:
    with specrt.load(bundle, threads=1) as runtime:
        yield runtime


@pytest.fixture
def slot(runtime: Runtime) -> Iterator[Slot]:
    slot = runtime.open_slot("model")
    yield slot
    slot.close()


def test_the_bundle_describes_the_head(bundle: Path, pair: HeadPair) -> None:
    manifest = manifest_from_bundle(bundle)
    check_files(bundle, manifest, always_hash=True)
    target, head = manifest.target, manifest.draft.model
    assert head is not None and manifest.draft.kind == "model"
    assert head.spec.reads_features and not target.spec.reads_features
    assert head.spec.feature_size == target.spec.feature_size == 64
    assert (head.spec.capacity, head.spec.vocab_size) == (target.spec.capacity, target.spec.vocab_size)
    assert len(head.spec.kv_layers) == 1 and head.samplers == target.samplers
    assert head.fingerprint == fingerprint_of(find_checkpoint(str(pair.head)))
    assert head.architecture == "EAGLE-3 head (speculators; taps 2 4 5)", "the variant that is used"
    assert (bundle / "draft" / "LICENSE").read_text() == "a head's licence\n"
    assert head.parity.argmax_agreement == 1.0 and head.parity.max_abs_error < 1e-4
    plan = {buffer.name: buffer for buffer in plan_slot(manifest, "onnxruntime")}
    assert plan[f"draft/{FEATURE_CACHE}"].num_bytes == 4 * 64 * (16 + head.spec.capacity + 1)
    assert plan[f"target/{FEATURES}"].num_bytes == 4 * 64 * target.spec.max_width
    assert plan[f"target/{FEATURES}"].alias == f"draft/{FEATURE_CACHE}"


def test_the_embedding_of_the_target_is_stored_once(bundle: Path) -> None:
    manifest = manifest_from_bundle(bundle)
    head, target = manifest.draft.model, manifest.target
    assert head is not None
    values = ir.load(bundle / head.graph).graph.initializers.values()
    places = {str(v.const_value.location): v for v in values if isinstance(v.const_value, ir.ExternalTensor)}
    assert places.keys() == {"model.onnx.data", "head.onnx.data"}
    table_bytes = target.spec.vocab_size * 64 * 4
    assert places["model.onnx.data"].const_value.nbytes == table_bytes  # type: ignore[union-attr]
    own_bytes = manifest.files["target/head.onnx.data"].num_bytes
    assert head.weights_bytes == own_bytes + table_bytes
    assert 0.95 * own_bytes <= head.bytes_per_pass <= own_bytes + 20_000, "all but the table"
    (memory,) = resident_memory(manifest)
    assert memory.mapped_bytes == own_bytes + manifest.files["target/model.onnx.data"].num_bytes


@pytest.mark.parametrize("k", [1, 3, K])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "in two chunks"])
def test_rounds_are_those_of_a_computation_without_caches(
    runtime: Runtime, slot: Slot, pair: HeadPair, target: Any, prompt: list[int], k: int
) -> None:
    expected = reference_rounds(target, pair.head, prompt, k, NUM_TOKENS)
    assert sum(accepted for _, accepted in expected) > 3, "the head is of use"
    plain = runtime.generate(prompt, max_new_tokens=NUM_TOKENS, draft="none", ignore_eos=True).token_ids
    for _ in range(2):  # the second time with the slot as the first one left it
        assert rounds_of(runtime, slot, prompt, k) == (expected, plain)


@pytest.mark.parametrize("fault", [Faults(tap_offset=-1), Faults(token_shift=0), Faults(keeps_own_rows=True)])
def test_rounds_of_a_head_with_a_fault_are_others(
    runtime: Runtime, slot: Slot, pair: HeadPair, target: Any, fault: Faults
) -> None:
    found, _ = rounds_of(runtime, slot, PROMPTS[0], 3)
    assert found != reference_rounds(target, pair.head, PROMPTS[0], 3, NUM_TOKENS, fault)


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_drafts_after_rounds_without_the_head_are_those_of_one_that_saw_all(
    runtime: Runtime, slot: Slot, pair: HeadPair, target: Any, draft: str
) -> None:
    """Features are kept up in all rounds: the same drafts follow the same text."""
    _, text = rounds_of(runtime, slot, PROMPTS[0], 3, draft)
    longer = [*PROMPTS[0], *text]
    found, _ = rounds_of(runtime, slot, longer, 3)
    assert found == reference_rounds(target, pair.head, longer, 3, NUM_TOKENS)


@pytest.mark.parametrize(
    "options",
    [
        {"draft": "model", "num_speculative_tokens": 2},
        {"draft": "model", "num_speculative_tokens": K, "reproducible": True},
        {"draft": "auto"},
        {"draft": "ngram"},
        {"draft": "model", "temperature": 0.9, "seed": 5},
        {"draft": "auto", "temperature": 0.9, "seed": 5, "top_p": 0.9},
        {"draft": "model", "repetition_penalty": 1.3, "num_speculative_tokens": 3},
    ],
    ids=str,
)
def test_the_text_is_the_target_s_own(bundle: Path, options: dict[str, Any]) -> None:
    with specrt.load(bundle, threads=1) as runtime:
        plain = {"draft": "none", **{k: v for k, v in options.items() if k not in ("draft", "num_speculative_tokens")}}
        if "seed" in options:
            plain["num_speculative_tokens"] = 0
        for prompt in (*PROMPTS, PROMPTS[0][:3], PROMPTS[1]):
            expected = runtime.generate(prompt, max_new_tokens=30, ignore_eos=True, **plain)
            assert (
                runtime.generate(prompt, max_new_tokens=30, ignore_eos=True, **options).token_ids == expected.token_ids
            )


def test_block_accepts_and_is_the_same_for_a_seed(runtime: Runtime) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 5, "rule": "block", "draft": "model", "ignore_eos": True}
    first, second = (
        runtime.generate(PROMPTS[0], max_new_tokens=60, num_speculative_tokens=3, **options) for _ in range(2)
    )
    assert first.token_ids == second.token_ids and first.stats.accepted > 0


def test_bans_of_every_drafted_id_leave_a_distribution(runtime: Runtime, slot: Slot) -> None:
    """The head's other ids are improbable, not impossible: if all ids were, there would be no probabilities."""
    assert slot.draft is not None
    slot.target.model.feed(PROMPTS[0], 1)
    slot.draft.model.feed(PROMPTS[0][1:], 1)
    (logits,) = slot.draft.model.read(LOGITS)
    drafted = np.flatnonzero(logits[0] > UNDRAFTED).tolist()
    assert len(drafted) == 150
    result = runtime.generate(
        PROMPTS[0], max_new_tokens=20, draft="model", temperature=1.0, seed=1, rule="block", num_speculative_tokens=3,
        banned_token_ids=drafted,
    )  # fmt: skip
    assert result.stats.drafted > 0 and not set(result.token_ids) & set(drafted)


@pytest.mark.parametrize(
    ("quantize", "draft_quantize"),
    [
        pytest.param("int8", "none", marks=pytest.mark.slow),
        ("none", "int4"),
        pytest.param("int4", "int8", marks=pytest.mark.slow),
    ],
)
def test_quantized_weights(exports: Exports, quantize: str, draft_quantize: str) -> None:
    """A table is stored as the target's, so that it is stored once; the fusing matmul stays as it is."""
    bundle = head_bundle(exports, quantize=quantize, draft_quantize=draft_quantize)
    manifest = manifest_from_bundle(bundle)
    head, target = manifest.draft.model, manifest.target
    assert head is not None and head.quantization == draft_quantize
    full = manifest_from_bundle(head_bundle(exports)).draft.model
    assert full is not None
    assert (head.bytes_per_pass < 0.5 * full.bytes_per_pass) == (draft_quantize != "none")
    graph = ir.load(bundle / head.graph).graph
    table = next(node for node in graph if node.op_type == "Gather" and node.inputs[1] is graph.inputs[0]).inputs[0]
    assert table is not None and isinstance(table.const_value, ir.ExternalTensor)
    assert str(table.const_value.location) == "model.onnx.data"
    fusing = next(node for node in ir.load(bundle / target.graph).graph if node.outputs[0].name == FEATURES)
    assert fusing.op_type == "Gemm"
    with specrt.load(bundle, threads=1) as runtime:
        texts = [
            runtime.generate(
                PROMPTS[0],
                max_new_tokens=40,
                draft=draft,
                num_speculative_tokens=k,
                reproducible=True,
                ignore_eos=True,
            )
            for draft, k in (("none", 0), ("model", 3))
        ]
    assert texts[0].token_ids == texts[1].token_ids and texts[1].stats.accepted > 0


def test_the_variants_are_scored_and_shown(bundle: Path) -> None:
    lines = notes_of(bundle).read_text().splitlines()
    assert any(line.startswith("taps 2 4 5") and line.endswith("(stated) (used)") for line in lines), lines


def test_a_head_of_another_target_is_refused(exports: Exports, pair: HeadPair, tmp_path: Path) -> None:
    other = exports.model(num_hidden_layers=8)
    with pytest.raises(PairError, match="no better than chance"):
        export(ExportOptions(str(other), tmp_path / "b", f"eagle3:{pair.head}", K, max_seq_len=64, prefill_chunk=16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_head_of_another_target_is_exported_where_its_variant_is_named(
    exports: Exports, pair: HeadPair, tmp_path: Path
) -> None:
    progress, draft = KeptProgress(), f"eagle3:{pair.head}"
    options: dict[str, Any] = {"taps": (1, 2, 3), "norm": ("output",), "max_seq_len": 64, "prefill_chunk": 16}
    export(ExportOptions(str(exports.model(num_hidden_layers=8)), tmp_path / "b", draft, K, **options), progress)
    assert any("chance" in line and "named" in line for line in progress.notes), progress.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "eagle3:"}, "expected eagle3:PATH_OR_HUB_ID"),
        ({"draft": "eagle3:head", "draft_vocab": 9}, "--draft-vocab: a head has its own draft vocabulary"),
        ({"draft": "eagle3:head", "draft_dtype": "fp16"}, "--draft-dtype: a head has the target's dtype"),
        ({"draft": "eagle3:head", "taps": (1, 2)}, "--taps 1,2: expected 3 hidden states"),
        ({"draft": "eagle3:head", "norm": ("post",)}, "--norm post: expected none, fc, fc-each, residual, output"),
        ({"draft": "eagle3:head", "norm": ("none", "fc")}, "exclude each other"),
        ({"draft": "eagle3:head", "feature_taps": (1,)}, "feature_taps: the features are the head's"),
        ({"draft": "self", "taps": (1, 2, 3)}, "--taps 1,2,3: only for --draft eagle3:HEAD"),
        ({"draft": "self", "feature_taps": (1,)}, "expected ngram"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExportOptions("target", Path("b"), **options)


def test_a_home_folder_is_found() -> None:
    """No shell expands it after the colon."""
    assert ExportOptions("target", Path("b"), "eagle3:~/head").head == str(Path.home() / "head")
    assert ExportOptions("target", Path("b"), "eagle3:org/head").head == "org/head"


def test_taps_that_are_no_numbers(tmp_path: Path) -> None:
    result = invoke("export", "target", "-o", tmp_path / "b", "--draft", "eagle3:head", "--taps", "2,x,4")
    assert result.exit_code == 2 and "expected numbers such as 2,15,27" in result.stderr


def test_a_norm_without_tensors_is_refused(pair: HeadPair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--norm fc: the head has the tensors of fc_norm none"):
        export(ExportOptions(str(pair.target), tmp_path / "b", f"eagle3:{pair.head}", norm=("fc",)))


def test_a_head_runs_where_its_target_does(bundle: Path) -> None:
    with pytest.raises(UsageError, match="the draft is a head, which runs where its target does"):
        specrt.load(bundle, threads=1, draft_device="cuda")
