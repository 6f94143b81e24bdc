"""Heads at the limits: contexts shorter than the reference text, few drafted ids, windows, no template, no end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import specrt
from specrt.engines.errors import SourceError
from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.export import export
from specrt.exporter.heads.files import head_from_folder
from specrt.exporter.heads.layouts import LAYOUTS
from specrt.exporter.heads.module import Head
from specrt.exporter.heads.settings import layer_config, rotation_for
from specrt.exporter.heads.tensors import read_offsets
from specrt.exporter.heads.texts import opening_ids, write_texts
from specrt.exporter.options import ExportOptions
from tests.exporter.heads.making import NUM_LAYERS, SIZE, head_config, random_head, save_head
from tests.exporter.heads.pairs import PROMPTS, head_bundle, head_pair
from tests.exporter.tracing.architectures import tiny_config
from tests.exports import Exports
from tests.tiny import tiny_llama_config
from tests.tools.commands import invoke


def drafts_its_text(bundle: Path, num_tokens: int, k: int) -> int:
    """Generate with and without the head, in all of the context; return how many drafted tokens were accepted."""
    with specrt.load(bundle, threads=1) as runtime:
        options: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": True}
        plain = runtime.generate(PROMPTS[0], draft="none", **options)
        found = runtime.generate(PROMPTS[0], draft="model", num_speculative_tokens=k, **options)
    assert found.token_ids == plain.token_ids and found.stats.drafted > 0
    return found.stats.accepted


@pytest.mark.parametrize("draft_quantize", ["none", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_context_shorter_than_the_reference_text(exports: Exports, draft_quantize: str) -> None:
    bundle = head_bundle(exports, max_seq_len=16, draft_quantize=draft_quantize)
    head = manifest_from_bundle(bundle).draft.model
    assert head is not None and head.parity.num_positions == 16
    assert drafts_its_text(bundle, 100, 3) > 0


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["head", "self:int8", "ngram"])
def test_a_short_context_is_verified(exports: Exports, draft: str, tmp_path: Path) -> None:
    """The stored reference is run again, in passes of every width, in all of the context."""
    is_head = draft == "head"
    bundle = head_bundle(exports, max_seq_len=20) if is_head else exports.bundle(exports.model(), draft, max_seq_len=20)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a dog", "raw": true}\n')
    found = invoke("verify", bundle, "--max-new-tokens", "8", "--prompts", tmp_path / "prompts.jsonl", "--threads", "1")
    assert found.exit_code == 0, found.output


def head_of_few(num_ids: int, target: Any) -> Head:
    """A random head that drafts the first ids of ``random_head``."""
    head = random_head(head_config(), target)
    few = Head(replace(head.config, draft_vocab_size=num_ids))
    of_ids = ("lm_head.weight", "d2t")
    few.load_state_dict({name: t[:num_ids] if name in of_ids else t for name, t in head.state_dict().items()})
    return few.requires_grad_(False)


def test_the_offset_of_a_single_id_is_the_id(target: Any, tmp_path: Path) -> None:
    """Two ids as offsets are refused, but one may be either."""
    one, two = (head_of_few(num, target) for num in (1, 2))
    save_head(tmp_path / "one", "speculators", one)
    loaded = head_from_folder(tmp_path / "one", NUM_LAYERS, SIZE, target.config.vocab_size)
    assert torch.equal(loaded.tensors["d2t"], one.d2t) and int(one.d2t) > 0
    two.d2t[1] += 1
    tensors = {"d2t": two.d2t, "t2d": torch.zeros(320, dtype=torch.bool).index_fill_(0, two.d2t, True)}
    with pytest.raises(SourceError, match="d2t of the head holds target ids"):
        read_offsets(tensors, 2, 320)


@pytest.mark.slow
@pytest.mark.parametrize("num_ids", [1, 2, 33])
def test_few_drafted_ids(exports: Exports, target: Any, tmp_path: Path, num_ids: int) -> None:
    """Quantized in blocks that are larger than the vocabulary is."""
    save_head(tmp_path / "head", "speculators", head_of_few(num_ids, target))
    options: dict[str, Any] = {"norm": ("none",), "max_seq_len": 64, "prefill_chunk": 16, "draft_quantize": "int4"}
    export(ExportOptions(str(head_pair(exports).target), tmp_path / "b", f"eagle3:{tmp_path / 'head'}", 4, **options))
    drafts_its_text(tmp_path / "b", 30, 3)


@pytest.mark.slow
def test_a_target_with_windows(exports: Exports, tmp_path: Path) -> None:
    """The text goes beyond the window, of all of its layers and of the first one in two."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    sizes = {name: getattr(tiny_llama_config(), name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
    config = Gemma3TextConfig(
        **sizes, intermediate_size=96, num_hidden_layers=8, num_key_value_heads=2, head_dim=16, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 4, max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    place = exports.model(config)
    save_head(tmp_path / "head", "SpecForge", random_head(head_config(), AutoModelForCausalLM.from_pretrained(place)))
    options: dict[str, Any] = {"norm": ("none",), "max_seq_len": 128, "prefill_chunk": 16}
    export(ExportOptions(str(place), tmp_path / "b", f"eagle3:{tmp_path / 'head'}", 4, **options))
    drafts_its_text(tmp_path / "b", 60, 3)


def test_texts_fit_into_a_short_context(target: Any) -> None:
    """The opening is cut first; every text has positions that are scored."""
    whole, cut, short = (write_texts(target, range(5, 25), context=context) for context in (None, 70, 32))
    assert [len(text[0].ids) for text in (whole, cut, short)] == [84, 70, 32]
    assert [text[0].num_prompt for text in (whole, cut, short)] == [20, 6, 1]
    assert all(len(text.ids[text.chains]) > 0 for text in (*whole, *cut, *short))


class WordsAlone:
    """A tokenizer without a template and special tokens, which does not know a word."""

    chat_template = bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": []}


def test_a_text_has_an_opening() -> None:
    assert opening_ids(WordsAlone()) == [0]


ROTATIONS = (
    "llama",
    "llama-rope-llama3",
    "llama-rope-yarn",
    "llama-rope-linear",
    "phi3-partial-rotary",
    "phi3-longrope",
)


@pytest.mark.parametrize("row", [*ROTATIONS, "gemma3", "gpt2"])
def test_a_new_head_rotates_as_heads_do(row: str) -> None:
    """What is written for a target is read again, whatever the target's own rotation is; all columns are turned."""
    text = tiny_config(row)
    rotation = rotation_for(text)
    layer = {**head_config().layer.to_diff_dict(), "rope_parameters": rotation}
    made, _ = layer_config({"transformer_layer_config": layer}, LAYOUTS[0])
    assert {key: made.rope_parameters[key] for key in rotation} == rotation
    cos, _ = LlamaRotaryEmbedding(made)(torch.zeros(1, 3, 64), torch.arange(3)[None])
    assert cos.shape == (1, 3, 16)
    if row == "gemma3":
        assert rotation["rope_theta"] == text.rope_parameters["full_attention"]["rope_theta"]
