"""Heads in files: what is read, written and refused."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specrt.engines.errors import PairError, SourceError, SpecrtError, UnsupportedModelError
from specrt.exporter.heads.config import HeadVariant
from specrt.exporter.heads.files import LoadedHead, build_head, head_from_folder, write_head
from tests.exporter.heads.making import NUM_LAYERS, SIZE, TAPS, Flags, head_config, random_head, save_head
from tests.exporter.sources.local_hub import Hub, local_hub
from tests.exports import Exports
from tests.tools.commands import invoke

VOCAB = 320
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def load(folder: Path, **changes: Any) -> LoadedHead:
    sizes = {"num_target_layers": NUM_LAYERS, "target_hidden_size": SIZE, "target_vocab_size": VOCAB}
    return head_from_folder(folder, **{**sizes, **changes})


def changed(folder: Path, layout: str, target: Any, change: Change, variant: HeadVariant | None = None) -> Path:
    """A head of ``layout`` whose config and tensors ``change`` edits."""
    save_head(folder, layout, random_head(head_config(variant=variant), target))
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("fc_norm", ["none", "whole", "each"])
@pytest.mark.parametrize("draft_vocab_size", [150, VOCAB])
def test_a_written_head_is_read_back(
    kind: str, fc_norm: Any, draft_vocab_size: int, target: Any, tmp_path: Path
) -> None:
    variant = HeadVariant((1, 4, 6), fc_norm, True, fc_norm != "none")
    head = random_head(head_config(kind, draft_vocab_size, variant), target)
    write_head(tmp_path / "head", head, "org/target", ["LlamaForCausalLM"])
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    loaded = load(tmp_path / "head")
    assert (loaded.layout, loaded.stated, loaded.notes) == ("speculators", variant, ())
    assert loaded.config.layer.to_dict() == {**head.config.layer.to_dict(), **loaded.config.layer.to_dict()}
    again = build_head(loaded.config, loaded.tensors, target.get_input_embeddings().weight)
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_taps_are_counted_as_each_trainer_counts(target: Any, tmp_path: Path) -> None:
    head = random_head(head_config(variant=HeadVariant((3, 4, 6))), target)
    for layout in ("SpecForge", "speculators"):
        folder = save_head(tmp_path / layout, layout, head)
        config = json.loads((folder / "config.json").read_text())
        ids = config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"]
        assert ids == {"SpecForge": [2, 3, 5], "speculators": [3, 4, 6]}[layout]
        assert load(folder).stated.taps == (3, 4, 6)
        assert load(folder, taps=[1, 2, 3]).stated.taps == (1, 2, 3)
    folder = save_head(tmp_path / "default", "official", head, Flags.of(head.config.variant, taps=None))
    assert load(folder).stated.taps == TAPS


def test_norms_in_the_files_are_read_when_no_flag_speaks(target: Any, tmp_path: Path) -> None:
    variant = HeadVariant(TAPS, "each")
    folder = changed(tmp_path / "head", "SpecForge", target, lambda config, _: config.pop("fc_norm"), variant)
    assert load(folder).stated == variant


def test_a_head_in_half_precision_with_biases_is_built(target: Any, tmp_path: Path) -> None:
    config = head_config()
    config.layer.attention_bias = config.layer.mlp_bias = True
    head = random_head(config, target).half()
    write_head(tmp_path / "head", head, "target")
    loaded = load(tmp_path / "head")
    assert "embed_tokens.weight" in loaded.tensors and loaded.tensors["fc.weight"].dtype == torch.float16
    built = build_head(loaded.config, loaded.tensors, torch.zeros(0))
    state = built.state_dict()
    for name in ("layer.self_attn.o_proj.bias", "layer.mlp.down_proj.bias"):
        assert torch.equal(state[name], head.state_dict()[name].float())


def put(**keys: Any) -> Change:
    return lambda config, _: config.update(keys)


def taps(ids: Any) -> Change:
    return put(eagle_config=None, eagle_aux_hidden_state_layer_ids=ids)


def tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda _, tensors: tensors.update({name: make(tensors[name])})


def _table(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _rewound(_: Any, tensors: dict[str, torch.Tensor]) -> None:
    del tensors["t2d"]
    tensors["d2t"] = tensors["d2t"].clone()
    tensors["d2t"][8] = tensors["d2t"][7] - 1  # the same id twice


REFUSED: dict[str, tuple[Change, type[SpecrtError], str]] = {
    "DFlash": (put(dflash_config={"mask_token_id": 1}), UnsupportedModelError, "is a DFlash draft"),
    "MTP": (
        lambda _, t: t.update({"mtp.fc.weight": torch.ones(1)}),
        UnsupportedModelError,
        "multi-token-prediction",
    ),
    "P-EAGLE": (put(architectures=["LlamaForCausalLMPEagle"]), UnsupportedModelError, "is a P-EAGLE head"),
    "EAGLE-1": (
        lambda _, t: (t.pop("d2t"), t.pop("t2d"), t.update({"fc.weight": torch.zeros(SIZE, 2 * SIZE)})),
        UnsupportedModelError,
        "is an EAGLE-1 or EAGLE-2 head",
    ),
    "a small model": (lambda _, t: t.pop("fc.weight"), UnsupportedModelError, "is no EAGLE-3 head: .* no fc.weight"),
    "architecture": (put(architectures=["Eagle3DeepseekV2"]), UnsupportedModelError, "kind 'Eagle3DeepseekV2'"),
    "layer type": (put(model_type="mistral"), UnsupportedModelError, "a layer of type 'mistral'"),
    "two layers": (put(num_hidden_layers=2), UnsupportedModelError, "has 2 layers"),
    "unknown key": (put(gated_residual=True), UnsupportedModelError, "has gated_residual = True"),
    "quantized": (put(quantization_config={"bits": 4}), UnsupportedModelError, "has quantization_config"),
    "unknown key within": (put(eagle_config={"step_bias": 2}), UnsupportedModelError, "has eagle_config.step_bias = 2"),
    "one hidden state": (put(eagle_config={"use_aux_hidden_state": False}), UnsupportedModelError, "last hidden state"),
    "rotation": (put(rope_scaling={"type": "dynamic", "factor": 2.0}), UnsupportedModelError, "rotation is 'dynamic'"),
    "sliding window": (put(use_sliding_window=True), UnsupportedModelError, "sliding window"),
    "both norms": (put(fc_norm=True, norm_before_fc=True), UnsupportedModelError, "norm_before_fc and fc_norm"),
    "five taps": (
        taps([1, 2, 3, 4, 5]),
        UnsupportedModelError,
        "reads 5 hidden states",
    ),
    "unread tensor": (
        lambda _, t: t.update({"fc.bias": torch.ones(SIZE)}),
        UnsupportedModelError,
        "reads the head's tens",
    ),
    "integers": (tensor("fc.weight", lambda t: t.to(torch.int8)), UnsupportedModelError, "fc.weight .* torch.int8"),
    "tap of no layer": (taps([2, 4, 8]), PairError, r"\[2, 4, 8\] of a target with 8"),
    "target's size": (put(target_hidden_size=128), PairError, "hidden states of 128 columns"),
    "vocabulary": (put(vocab_size=400), PairError, "vocabulary of 400 ids, and the target has 320"),
    "d2t out of range": (tensor("d2t", lambda t: t + 200), PairError, "d2t of the head maps to the target's ids"),
    "d2t is a table": (_table, SourceError, "d2t of the head holds target ids"),
    "d2t is not increasing": (_rewound, SourceError, "increasing, different target ids"),
    "d2t and t2d differ": (tensor("t2d", lambda t: ~t), SourceError, "t2d and d2t of the head name different"),
    "d2t is absent": (lambda _, t: t.pop("d2t"), SourceError, "has no d2t"),
    "absent norms": (put(fc_norm=True), SourceError, "no tensor fc_norm.0.weight"),
    "absent tensor": (lambda _, t: t.pop("norm.weight"), SourceError, "no tensor norm.weight"),
    "wrong shape": (tensor("lm_head.weight", lambda t: t[:-1]), SourceError, r"lm_head.weight .* \[149, 64\]"),
    "wrong heads": (put(num_attention_heads=8), SourceError, "q_proj.weight of the head is"),
    "not finite": (tensor("norm.weight", lambda t: t / 0), SourceError, "not finite"),
    "no vocab_size": (lambda config, _: config.pop("vocab_size"), SourceError, "vocab_size is None"),
    "taps of no kind": (taps("2,4,5"), SourceError, "expected numbers of layers"),
    "taps twice": (put(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), SourceError, "eagle_config too"),
    "an object expected": (put(eagle_config=[1]), SourceError, "expected an object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_heads_are_refused_in_one_line(case: str, target: Any, tmp_path: Path) -> None:
    change, error, message = REFUSED[case]
    folder = changed(tmp_path / "head", "SpecForge", target, change)
    with pytest.raises(error, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["DFlash", "MTP", "EAGLE-1", "target's size", "vocabulary", "d2t out of range"])
def test_the_command_refuses_other_heads(case: str, target: Any, exports: Exports, tmp_path: Path) -> None:
    """By one line and the exit code of the error: 4 for other kinds of drafts, 5 for a head of another target."""
    change, error, message = REFUSED[case]
    draft = f"eagle3:{changed(tmp_path / 'head', 'SpecForge', target, change)}"
    result = invoke("export", exports.model(num_hidden_layers=8), "-o", tmp_path / "bundle", "--draft", draft)
    assert result.exit_code == error.exit_code and error.exit_code in (4, 5)
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert re.search(message, line) and result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_head_of_a_hub_id_has_its_commit(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_head(tmp_path / "head", "speculators", random_head(head_config(), target))
    with local_hub(monkeypatch, tmp_path / "cache") as answers:
        answers.update({path.name: path.read_bytes() for path in folder.iterdir()})
        found, expected = load(Path("org/head")), load(folder)
    assert (found.revision, expected.revision) == (Hub.commit, None)
    assert found.stated == expected.stated
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    with pytest.raises(SourceError, match="--draft-revision main is for hub ids, this is a local path"):
        load(folder, revision="main")


def test_the_targets_embedding_must_fit(target: Any, tmp_path: Path) -> None:
    head = random_head(head_config(), target)
    folder = save_head(tmp_path / "head", "official", head, target_hidden_size=32)
    with pytest.raises(PairError, match=r"no embed_tokens.weight, and its 64 columns are not the target's 32"):
        load(folder, target_hidden_size=32)


def test_keys_that_are_off_or_of_the_tokenizer_do_not_matter(target: Any, tmp_path: Path) -> None:
    head = random_head(head_config(), target)
    keys: dict[str, Any] = {"gated_residual": False, "im_end_id": 5, "rope_scaling": None, "target_model_type": "qwen3"}
    assert load(save_head(tmp_path / "head", "AngelSlim", head, **keys)).stated == HeadVariant(TAPS)


def test_mrope_is_the_default_rotation_for_text(target: Any, tmp_path: Path) -> None:
    head = random_head(head_config(), target)
    keys: dict[str, Any] = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    loaded = load(save_head(tmp_path / "head", "AngelSlim", head, **keys))
    assert loaded.config.layer.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert "mrope" in loaded.notes[0]


def test_damaged_files_are_refused(target: Any, tmp_path: Path) -> None:
    head = random_head(head_config(), target)
    folder = save_head(tmp_path / "safetensors", "SpecForge", head)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SourceError, match="truncated or damaged"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config.json is no JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(SourceError, match=r"no config.json"):
        load(folder)


def test_a_pickle_runs_no_code(target: Any, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", "official", random_head(head_config(), target))
    mark = tmp_path / "ran"

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (mark,)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Code()}))
    with pytest.raises(SourceError, match="truncated or damaged"):
        load(folder)
    assert not mark.exists()
