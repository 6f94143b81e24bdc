"""``export`` on a tiny pair: what it writes, what it refuses, and that nothing is left when it fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, MambaConfig

import specrt
from specrt.engines.errors import (
    BackendError,
    PairError,
    ParityError,
    ResourceError,
    SourceError,
    SpecrtError,
    UnsupportedModelError,
    UsageError,
)
from specrt.engines.heads import HEAD_NAMES, head_contract
from specrt.engines.integrity import check_files
from specrt.engines.manifest import DraftEntry, Manifest, ModelEntry, manifest_from_bundle
from specrt.engines.oracle import filtered
from specrt.engines.ort import OrtEngine
from specrt.engines.spec import STANDARD_DIALECT, ModelSpec
from specrt.exporter.bundle import file_entries, write_manifest
from specrt.exporter.export import export
from specrt.exporter.heads import write_heads
from specrt.exporter.options import ExportOptions
from specrt.exporter.precision import FLOAT16_MAX, expected_logits, largest_activation
from specrt.exporter.reference import check_parity, graph_logits, reference_logits
from tests.tiny import save_tiny_model, tiny_llama_config, tiny_tokenizer

K = 4
MAX_SEQ_LEN = 96
PADDING = 40  # ids beyond the tokenizer's


def _set_generation_config(folder: Path, **changes: Any) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    target = save_tiny_model(root / "target")
    (target / "LICENSE").write_text("a licence\n")
    _set_generation_config(target, do_sample=True, temperature=0.6, top_k=20)
    draft = save_tiny_model(root / "draft", num_hidden_layers=1, hidden_size=32, max_position_embeddings=64)
    return {"target": target, "draft": draft}


def _export(models: dict[str, Path], output: Path, **changes: Any) -> Manifest:
    options = {"target": str(models["target"]), "num_speculative_tokens": K, "max_seq_len": MAX_SEQ_LEN, **changes}
    return export(ExportOptions(output=output, prefill_chunk=16, **options))


@pytest.fixture(scope="module")
def pair(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundles") / "pair"
    _export(models, output, draft=str(models["draft"]))
    return output


def _greedy(folder: Path, ids: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.tensor([ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in output[0, len(ids) :]]


def test_bundle_says_what_it_holds(pair: Path, models: dict[str, Path]) -> None:
    manifest = manifest_from_bundle(pair)
    check_files(pair, manifest, always_hash=True)
    on_disk = {path.relative_to(pair).as_posix() for path in pair.rglob("*") if path.is_file()}
    assert on_disk == {"bundle.json", *manifest.files}
    assert (pair / "target" / "LICENSE").read_text() == "a licence\n"
    assert manifest.draft.kind == "model"
    assert manifest.draft.model is not None
    assert manifest.draft.model.spec.max_seq_len == 64
    assert manifest.target.spec.capacity == MAX_SEQ_LEN + K
    assert manifest.target.parity.argmax_agreement == 1.0
    assert manifest.target.bytes_per_pass < manifest.target.weights_bytes
    for name in manifest.files:
        if name.endswith(".onnx"):
            onnx.checker.check_model(str(pair / name)) if "heads" in name else onnx.load(pair / name)


def _load_heads(bundle: Path, entry: ModelEntry, vocab_size: int) -> None:
    """Every head of ``entry`` honours its contract, for one row as for all."""
    for name, path in entry.heads.items():
        for max_rows in (1, entry.spec.max_rows):
            OrtEngine(bundle / path, head_contract(name, replace(entry.spec, max_rows=max_rows), vocab_size), threads=1)


def test_heads_are_written_once_for_models_of_one_vocabulary(pair: Path) -> None:
    manifest = manifest_from_bundle(pair)
    draft = manifest.draft.model
    assert draft is not None
    paths = {name: f"heads/{name}.onnx" for name in HEAD_NAMES}
    assert manifest.target.heads == draft.heads == paths
    assert {name for name in manifest.files if name.startswith("heads/")} == set(paths.values())
    for entry in (manifest.target, draft):
        _load_heads(pair, entry, manifest.target.spec.vocab_size)


def test_generation_defaults_are_those_of_the_target_s_generation_config(pair: Path) -> None:
    """They are used where they are asked for, and only there."""
    assert manifest_from_bundle(pair).generation_defaults == {"temperature": 0.6, "top_k": 20.0}
    with specrt.load(pair, threads=1) as runtime:
        plain = runtime.generate([5, 6, 7], max_new_tokens=1).settings
        asked = runtime.generate([5, 6, 7], max_new_tokens=1, model_defaults=True, top_p=0.5).settings
    assert (plain.temperature, plain.top_k, plain.top_p) == (0, 0, 1)
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.6, 20, 0.5)


def test_reference_logits_are_reproduced_without_torch(pair: Path) -> None:
    entry = manifest_from_bundle(pair).target
    stored = np.load(pair / entry.reference)
    logits = graph_logits(pair / entry.graph, entry.spec, stored["ids"], threads=1)
    assert np.abs(logits[stored["positions"]] - stored["logits"]).max() <= 2 * entry.parity.max_abs_error + 1e-6


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_moved_bundle_generates_the_models_own_ids(
    pair: Path, models: dict[str, Path], draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another working directory, after a move; over the draft's shorter context (64) and to the target's end."""
    moved = tmp_path / "else where"
    shutil.copytree(pair, moved)
    monkeypatch.chdir(tmp_path)
    with specrt.load("else where", threads=1) as runtime:
        ids = runtime.codec.encode("The quick brown fox")
        expected = _greedy(models["target"], ids, MAX_SEQ_LEN - len(ids))
        for k in range(K + 1):
            result = runtime.generate(ids, max_new_tokens=200, num_speculative_tokens=k, draft=draft)
            assert result.token_ids == expected, f"K = {k}"
        assert result.finish_reason == ("stop" if len(expected) < MAX_SEQ_LEN - len(ids) else "length")


def _off_by_a_little(source: Path, folder: Path, vocab_size: int) -> Path:
    """``source`` with another vocabulary size and noise in its weights: its drafts are accepted now and then."""
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(1)
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.05)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wider_draft(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of one tokenizer, whose draft has more ids than the tokenizer. The target says that it is greedy."""
    root = tmp_path_factory.mktemp("padded")
    target = shutil.copytree(models["target"], root / "target")
    _set_generation_config(target, do_sample=False, temperature=0.7, top_p=0.9, repetition_penalty=1.1)
    draft = _off_by_a_little(target, root / "draft", len(tiny_tokenizer()) + PADDING)
    _export({"target": target}, root / "bundle", draft=str(draft))
    return root / "bundle"


def _swap_roles(bundle: Path, output: Path) -> Path:
    """The bundle that an export of the same models in the other roles would be, without its time."""
    shutil.copytree(bundle, output, ignore=shutil.ignore_patterns("heads"))
    manifest = manifest_from_bundle(bundle)
    target, draft = manifest.draft.model, manifest.target
    assert target is not None
    vocab_size = target.spec.vocab_size
    target = replace(target, heads=write_heads(output, "heads", target.spec, vocab_size))
    draft = replace(draft, heads=write_heads(output, "heads/draft", draft.spec, vocab_size))
    files = file_entries(output, lambda num_bytes: None)
    write_manifest(output, replace(manifest, target=target, draft=DraftEntry("model", draft), files=files))
    return output


@pytest.fixture(scope="module", params=["wider draft", "wider target"])
def padded(request: pytest.FixtureRequest, wider_draft: Path) -> Path:
    if request.param == "wider draft":
        return wider_draft
    return _swap_roles(wider_draft, wider_draft.with_name("swapped"))


def test_a_draft_of_another_padded_vocabulary_has_heads_of_its_own(padded: Path) -> None:
    manifest = manifest_from_bundle(padded)
    target, draft = manifest.target, manifest.draft.model
    assert draft is not None
    assert abs(target.spec.vocab_size - draft.spec.vocab_size) == PADDING
    assert target.heads == {name: f"heads/{name}.onnx" for name in HEAD_NAMES}
    assert draft.heads == {name: f"heads/draft/{name}.onnx" for name in HEAD_NAMES}
    written = {name for name in manifest.files if name.startswith("heads/")}
    assert written == {*target.heads.values(), *draft.heads.values()}
    check_files(padded, manifest, always_hash=True)
    for entry in (target, draft):
        _load_heads(padded, entry, target.spec.vocab_size)


def test_a_model_that_does_not_sample_is_greedy_by_its_defaults(wider_draft: Path) -> None:
    assert manifest_from_bundle(wider_draft).generation_defaults == {"temperature": 0.0, "repetition_penalty": 1.1}
    with specrt.load(wider_draft, threads=1) as runtime:
        settings = runtime.generate([5, 6, 7], max_new_tokens=1, model_defaults=True).settings
    assert (settings.temperature, settings.top_p, settings.repetition_penalty) == (0, 1, 1.1)


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_match_gives_the_target_s_own_ids_with_a_padded_vocabulary(padded: Path, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature, "ignore_eos": True}
    accepted = 0
    with specrt.load(padded, threads=1) as runtime:
        ids = runtime.codec.encode("The quick brown fox")
        for seed in range(6):
            expected = runtime.generate(ids, **options, seed=seed, num_speculative_tokens=0)
            for k in (1, K):
                result = runtime.generate(ids, **options, seed=seed, num_speculative_tokens=k, rule="match")
                assert (result.token_ids, result.text) == (expected.token_ids, expected.text), f"seed {seed}, K = {k}"
                accepted += result.stats.accepted
    assert accepted > 0


def _chances(bundle: Path, prompt: list[int], num_tokens: int) -> dict[tuple[int, ...], float]:
    """Chances of the next ``num_tokens`` ids at temperature 0.8 and top-k 3, from the target's graph in numpy."""
    entry = manifest_from_bundle(bundle).target
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for ids, chance in chances.items():
            logits = graph_logits(bundle / entry.graph, entry.spec, np.array([*prompt, *ids]), threads=1)[-1:]
            probs = filtered(logits, temperature=0.8, top_k=3)[0]
            longer |= {(*ids, int(token)): chance * float(probs[token]) for token in np.flatnonzero(probs)}
        chances = longer
    return chances


@pytest.mark.parametrize("rule", ["match", "token", "block"])
def test_every_rule_draws_from_the_target_with_a_padded_vocabulary(padded: Path, rule: str) -> None:
    """The first token of the prefill, and two that a round judges or draws: chi-square with many seeds."""
    prompt, num_draws, least = [5, 6, 7], 400, 5
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 3, "rule": rule, "num_speculative_tokens": 2}
    chances = _chances(padded, prompt, 3)
    counts, accepted = dict.fromkeys(chances, 0), 0
    with specrt.load(padded, threads=1) as runtime:
        for seed in range(num_draws):
            result = runtime.generate(prompt, **options, max_new_tokens=4, ignore_eos=True, seed=seed)
            counts[tuple(result.token_ids[:3])] += 1  # a KeyError is an id that cannot be drawn
            accepted += result.stats.accepted
            if seed < 20:
                again = runtime.generate(prompt, **options, max_new_tokens=4, ignore_eos=True, seed=seed)
                assert again.token_ids == result.token_ids
    assert accepted > num_draws / 4
    common = [ids for ids, chance in chances.items() if chance * num_draws >= least]
    cells = [(counts[ids], chances[ids] * num_draws) for ids in common]
    cells.append((num_draws - sum(count for count, _ in cells), num_draws - sum(wanted for _, wanted in cells)))
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    degrees = len(cells) - 1
    assert degrees >= 6
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5, (statistic, degrees)


def test_self_draft_accepts_everything(models: dict[str, Path], tmp_path: Path) -> None:
    manifest = _export(models, tmp_path / "self", draft="self")
    assert manifest.draft.kind == "self"
    assert not (tmp_path / "self" / "draft").exists()
    with specrt.load(tmp_path / "self", threads=1) as runtime:
        stats = runtime.generate([5, 6, 7], max_new_tokens=80, ignore_eos=True, num_speculative_tokens=K).stats
    assert stats.draft_acceptance_rate == 1.0
    assert stats.completion_tokens == 80


def test_fp16_bundle(models: dict[str, Path], tmp_path: Path) -> None:
    manifest = _export(models, tmp_path / "half", dtype="fp16")
    full = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["target"]).parameters()) * 2
    assert manifest.target.spec.dtype == "float16"
    assert full <= manifest.target.weights_bytes <= full * 1.2
    assert specrt.load(tmp_path / "half", threads=1).generate([5, 6], max_new_tokens=8, ignore_eos=True).token_ids


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_bundle_for_tensorrt(models: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    """Both TensorRT backends run it; a bf16 graph is compared by its fp32 twin, which does not stay."""
    manifest = _export(models, tmp_path / "bundle", backend="tensorrt", dtype=dtype)
    assert manifest.backends == ("tensorrt", "tensorrt-rtx")
    entry = manifest.target
    assert (entry.spec.dialect, entry.spec.dtype) == ("standard", {"fp16": "float16", "bf16": "bfloat16"}[dtype])
    assert entry.parity.max_abs_error <= {"fp16": 2e-2, "bf16": 1e-4}[dtype] * entry.parity.max_abs_logit
    check_files(tmp_path / "bundle", manifest, always_hash=True)
    assert not list(tmp_path.rglob("twin*"))
    full = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(models["target"]).parameters()) * 2
    assert full <= entry.weights_bytes <= full * 1.1
    with pytest.raises(BackendError, match=r"not installed; pip install|no engines for tensorrt"):
        specrt.load(tmp_path / "bundle")


def test_the_default_dtype_is_the_dialect_s(tmp_path: Path) -> None:
    for backend, dtype in (("onnxruntime", "float32"), ("tensorrt-rtx", "float16")):
        options = ExportOptions("x", tmp_path, backend=backend)
        assert [options.dtype_of(role) for role in ("target", "draft")] == [dtype, dtype]


def _hot(folder: Path, factor: float) -> Path:
    """A model whose activations grow ``factor`` times larger than the tiny Llama's."""
    save_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    hot = {name: tensor * factor if "down_proj" in name else tensor for name, tensor in weights.items()}
    save_file(hot, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_fp16_that_overflows_is_refused_for_tensorrt_and_bf16_holds(tmp_path: Path) -> None:
    target = {"target": _hot(tmp_path / "hot", 1e6)}
    with pytest.raises(ParityError, match="not finite; export in --dtype bf16"):
        _export(target, tmp_path / "bundle", backend="tensorrt-rtx")
    assert list(tmp_path.iterdir()) == [target["target"]]
    _export(target, tmp_path / "bundle", backend="tensorrt-rtx", dtype="bf16")


def test_fp16_that_is_nearly_full_is_said() -> None:
    notes: list[str] = []
    model = AutoModelForCausalLM.from_config(tiny_llama_config(), dtype=torch.float16).eval()
    ids = np.arange(8)
    spec = ModelSpec(320, 96, 100, 16, K + 1, "float16", (), STANDARD_DIALECT)
    logits = expected_logits(model, spec, ids, notes.append)
    assert notes == []
    assert np.abs(logits).max() <= largest_activation(model, ids) < FLOAT16_MAX / 2
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7 * FLOAT16_MAX / float(np.abs(logits).max()))
    expected_logits(model, spec, ids, notes.append)
    (note,) = notes
    assert "fp16 ends at 65504" in note and "--dtype bf16" in note


def test_overflow_in_fp16_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "hot", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 1e3 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ParityError, match="not finite"):
        _export({"target": folder}, tmp_path / "bundle", dtype="fp16")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_graph_that_answers_otherwise_is_refused(pair: Path) -> None:
    entry = manifest_from_bundle(pair).target
    stored = np.load(pair / entry.reference)
    logits = graph_logits(pair / entry.graph, entry.spec, stored["ids"], threads=1)
    check_parity(pair / entry.graph, entry.spec, stored["ids"], logits, threads=1)
    logits[11, 3] += 0.01 * np.abs(logits).max()
    with pytest.raises(ParityError, match="differ from the torch model"):
        check_parity(pair / entry.graph, entry.spec, stored["ids"], logits, threads=1)


class _Unsteady:
    """A model whose passes differ ``times`` times before they settle."""

    dtype = torch.float32

    def __init__(self, times: int) -> None:
        self.left = times

    def set_attn_implementation(self, name: str) -> None: ...

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.left -= 1
        logits = torch.ones(1, input_ids.shape[1], 4) + max(self.left, 0) * 1e-3
        return SimpleNamespace(logits=logits)


def test_reference_is_what_two_passes_agree_on() -> None:
    ids = np.arange(3)
    assert (reference_logits(_Unsteady(0), ids) == 1).all()
    assert (reference_logits(_Unsteady(2), ids) == 1).all()
    with pytest.raises(ParityError, match="other logits at every pass"):
        reference_logits(_Unsteady(9), ids)


def _other_family(models: dict[str, Path], folder: Path) -> Path:
    """The draft with two of its tokens swapped."""
    shutil.copytree(models["draft"], folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    first, second = (token for token, index in vocab.items() if index in (40, 41))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(data))
    Tokenizer.from_file(str(path))
    return folder


def _broken(case: str, models: dict[str, Path], root: Path) -> tuple[dict[str, Path], dict[str, Any]]:
    """(models, options) of an export that must be refused."""
    if case == "no such path":
        return {"target": root / "nowhere.gguf"}, {}
    if case == "folder without weights":
        shutil.copytree(models["target"], root / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
        return {"target": root / "bare"}, {}
    if case == "folder without config":
        (root / "empty").mkdir()
        return {"target": root / "empty"}, {}
    if case == "truncated weights":
        shutil.copytree(models["target"], root / "cut")
        weights = root / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        return {"target": root / "cut"}, {}
    if case == "not a GGUF file":
        (root / "x.gguf").write_bytes(b"GGUF but not really")
        return {"target": root / "x.gguf"}, {}
    if case == "recurrent state":
        config = MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2)
        return {"target": save_tiny_model(root / "mamba", config)}, {}
    if case == "draft of another family":
        return models, {"draft": str(_other_family(models, root / "other"))}
    options: dict[str, dict[str, Any]] = {
        "K of 0": {"num_speculative_tokens": 0},
        "context beyond the model's": {"max_seq_len": 100_000},
        "bf16 on the CPU": {"dtype": "bf16"},
        "fp32 with TensorRT": {"dtype": "fp32", "backend": "tensorrt-rtx"},
        "w8a8 with TensorRT": {"quantize": "w8a8", "backend": "tensorrt-rtx"},
        "w8a8 draft with TensorRT": {"draft": "self:w8a8", "backend": "tensorrt"},
        "unknown backend": {"backend": "nothing"},
        "revision of a local path": {"revision": "main"},
    }
    return models, options[case]


REFUSALS: dict[str, type[SpecrtError]] = {
    "no such path": SourceError,
    "folder without weights": SourceError,
    "folder without config": SourceError,
    "truncated weights": SourceError,
    "not a GGUF file": SourceError,
    "revision of a local path": SourceError,
    "recurrent state": UnsupportedModelError,
    "draft of another family": PairError,
    "K of 0": UsageError,
    "context beyond the model's": UsageError,
    "bf16 on the CPU": UsageError,
    "fp32 with TensorRT": UsageError,
    "w8a8 with TensorRT": UsageError,
    "w8a8 draft with TensorRT": UsageError,
    "unknown backend": UsageError,
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line_and_nothing_written(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    inputs, options = _broken(case, models, tmp_path)
    place = tmp_path / "out"
    place.mkdir()
    with pytest.raises(REFUSALS[case]) as error:
        _export(inputs, place / "bundle", **options)
    assert "\n" not in str(error.value)
    assert list(place.iterdir()) == []


def test_existing_bundle_is_kept_without_force_and_replaced_with_it(models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    _export(models, output)
    before = (output / "bundle.json").read_text()
    with pytest.raises(UsageError, match="--force"):
        _export(models, output)
    assert (output / "bundle.json").read_text() == before
    _export(models, output, force=True, num_speculative_tokens=3)
    assert manifest_from_bundle(output).num_speculative_tokens == 3
    assert list(tmp_path.iterdir()) == [output]


def test_force_does_not_delete_what_is_not_a_bundle(models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(UsageError, match="not a bundle"):
        _export(models, tmp_path, force=True)
    assert (tmp_path / "letters.txt").read_text() == "dear"


def test_too_little_disk_is_said_before_any_work(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ResourceError, match="GB are free"):
        _export(models, tmp_path / "out" / "bundle")
    assert list(tmp_path.iterdir()) == []


class _Interrupting:
    """Progress that presses Ctrl-C when a step begins."""

    def __init__(self, at: str) -> None:
        self.at = at

    def step(self, name: str, total: int | None = None) -> None:
        if name == self.at:
            raise KeyboardInterrupt

    def advance(self, amount: int) -> None: ...

    def note(self, line: str) -> None: ...


@pytest.mark.parametrize(
    "step",
    [
        "target: loading weights",
        "target: tracing",
        "target: writing",
        "target: comparing with the torch model",
        "hashing",
    ],
)
def test_interrupted_export_leaves_nothing(step: str, models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        export(ExportOptions(str(models["target"]), tmp_path / "bundle"), _Interrupting(step))
    assert list(tmp_path.iterdir()) == []


def test_interrupted_command_exits_with_130_and_leaves_nothing(models: dict[str, Path], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "specrt.tools.cli",
        "export",
        str(models["target"]),
        "-o",
        str(tmp_path / "bundle"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not list(tmp_path.glob(".bundle.partial-*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
