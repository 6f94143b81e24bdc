"""A ``bundle.json`` that contradicts itself: each kind is refused in one line with the cause and the fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.codec import from_json, to_json
from specrt.engines.contract import ModelSpec, model_contract
from specrt.engines.manifest import MANIFEST_NAME, SCHEMA_VERSION
from tests.engines.test_manifest import full_manifest, refusal, write


def of_another_dialect(data: dict[str, Any]) -> None:
    data["target"]["spec"]["dialect"] = "standard"


def of_an_unknown_dialect(data: dict[str, Any]) -> None:
    data["backends"] = ["fake"]
    data["target"]["spec"]["dialect"] = "klingon"


def unknown_key(data: dict[str, Any]) -> None:
    data["target"]["spec"]["colour"] = "red"


def missing_key(data: dict[str, Any]) -> None:
    del data["tokenizer"]["file"]


def mistyped_key(data: dict[str, Any]) -> None:
    data["files"]["target/model.onnx"]["num_bytes"] = "10"


def version_as_a_float(data: dict[str, Any]) -> None:
    data["schema_version"] = float(SCHEMA_VERSION)


def renamed_input(data: dict[str, Any]) -> None:
    data["target"]["inputs"][0]["name"] = "tokens_in"


def output_without_alias(data: dict[str, Any]) -> None:
    data["draft"]["model"]["outputs"][1]["alias"] = None


def smaller_vocabulary(data: dict[str, Any]) -> None:
    data["target"]["spec"]["vocab_size"] -= 1


def unknown_draft_kind(data: dict[str, Any]) -> None:
    data["draft"]["kind"] = "oracle"


def draft_model_of_another_kind(data: dict[str, Any]) -> None:
    data["draft"]["kind"] = "ngram"


def no_draft_model(data: dict[str, Any]) -> None:
    data["draft"]["model"] = None


def no_drafted_tokens(data: dict[str, Any]) -> None:
    data["num_speculative_tokens"] = 0


def file_outside(data: dict[str, Any]) -> None:
    data["files"]["target/../../secret"] = {"num_bytes": 1, "sha256": ""}


def absolute_file(data: dict[str, Any]) -> None:
    data["files"]["/secret"] = {"num_bytes": 1, "sha256": ""}


def graph_outside(data: dict[str, Any]) -> None:
    data["target"]["graph"] = "../model.onnx"


def unlisted_reference(data: dict[str, Any]) -> None:
    del data["files"]["draft/reference.npz"]


def samplers_of_the_bundle(data: dict[str, Any]) -> None:
    data["samplers"] = {"match": "samplers/match.onnx"}


def model_without_samplers(data: dict[str, Any]) -> None:
    del data["target"]["samplers"]


def missing_sampler(data: dict[str, Any]) -> None:
    del data["target"]["samplers"]["nucleus"]


def missing_sampler_of_the_draft(data: dict[str, Any]) -> None:
    del data["draft"]["model"]["samplers"]["block"]


def no_samplers(data: dict[str, Any]) -> None:
    data["target"]["samplers"] = {}


def samplers_in_a_list(data: dict[str, Any]) -> None:
    data["target"]["samplers"] = ["samplers/match.onnx"]


def sampler_without_a_path(data: dict[str, Any]) -> None:
    data["draft"]["model"]["samplers"]["block"] = None


def unlisted_sampler(data: dict[str, Any]) -> None:
    del data["files"]["samplers/block.onnx"]


def unlisted_sampler_of_the_draft(data: dict[str, Any]) -> None:
    data["draft"]["model"]["samplers"]["match"] = "samplers/mine.onnx"


def unlisted_sampler_of_another_name(data: dict[str, Any]) -> None:
    data["target"]["samplers"]["guess"] = "samplers/guess.onnx"


def sampler_outside(data: dict[str, Any]) -> None:
    data["target"]["samplers"]["match"] = "../match.onnx"


def wider_than_its_target(data: dict[str, Any]) -> None:
    """A head; its inputs and outputs are those of its spec."""
    for entry, reads in ((data["target"], False), (data["draft"]["model"], True)):
        entry["spec"] |= {"feature_size": 8, "reads_features": reads, "max_width": 16 + reads}
        contract = model_contract(from_json(ModelSpec, entry["spec"]))
        entry["inputs"], entry["outputs"] = to_json(contract.inputs), to_json(contract.outputs)


def without_generation_defaults(data: dict[str, Any]) -> None:
    del data["generation_defaults"]


def defaults_in_a_list(data: dict[str, Any]) -> None:
    data["generation_defaults"] = [["temperature", 0.7]]


def default_in_words(data: dict[str, Any]) -> None:
    data["generation_defaults"]["temperature"] = "0.7"


def default_of_none(data: dict[str, Any]) -> None:
    data["generation_defaults"]["top_p"] = None


def default_of_yes(data: dict[str, Any]) -> None:
    data["generation_defaults"]["top_k"] = True


def nested_default(data: dict[str, Any]) -> None:
    data["generation_defaults"]["min_p"] = {"value": 0.1}


def unlisted_tokenizer(data: dict[str, Any]) -> None:
    data["tokenizer"]["file"] = "tokenizer.json"


def unlisted_chat_template(data: dict[str, Any]) -> None:
    del data["files"]["tokenizer/chat.jinja"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (unknown_key, "Manifest.target.spec: unknown key 'colour'"),
        (missing_key, "Manifest.tokenizer: key 'file' is missing"),
        (mistyped_key, "Manifest.files.target/model.onnx.num_bytes: got str, expected int"),
        (version_as_a_float, "Manifest.schema_version: got float, expected int"),
        (of_another_dialect, "target/model.onnx: dialect 'standard' does not fit onnxruntime"),
        (of_an_unknown_dialect, "target/model.onnx: dialect 'klingon' does not fit fake"),
        (renamed_input, "target/model.onnx: its inputs and outputs are not those that its spec implies"),
        (output_without_alias, "draft/model.onnx: its inputs and outputs are not those that its spec implies"),
        (smaller_vocabulary, "target/model.onnx: its inputs and outputs are not those that its spec implies"),
        (unknown_draft_kind, "draft: kind 'oracle' and its model do not go together"),
        (draft_model_of_another_kind, "draft: kind 'ngram' and its model do not go together"),
        (no_draft_model, "draft: kind 'model' and its model do not go together"),
        (no_drafted_tokens, "num_speculative_tokens: got 0, expected 1 or more"),
        (file_outside, "files: 'target/../../secret' leads out of the bundle"),
        (absolute_file, "files: '/secret' leads out of the bundle"),
        (graph_outside, "files: '../model.onnx' is named by the bundle but not listed"),
        (unlisted_reference, "files: 'draft/reference.npz' is named by the bundle but not listed"),
        (samplers_of_the_bundle, "Manifest: unknown key 'samplers'"),
        (model_without_samplers, "Manifest.target: key 'samplers' is missing"),
        (missing_sampler, "target/model.onnx: its sampler 'nucleus' is missing"),
        (missing_sampler_of_the_draft, "draft/model.onnx: its sampler 'block' is missing"),
        (no_samplers, "target/model.onnx: its sampler 'block' is missing"),
        (samplers_in_a_list, "Manifest.target.samplers: got list, expected dict"),
        (sampler_without_a_path, "Manifest.draft.model.samplers.block: got NoneType, expected str"),
        (unlisted_sampler, "files: 'samplers/block.onnx' is named by the bundle but not listed"),
        (unlisted_sampler_of_the_draft, "files: 'samplers/mine.onnx' is named by the bundle but not listed"),
        (unlisted_sampler_of_another_name, "files: 'samplers/guess.onnx' is named by the bundle but not listed"),
        (sampler_outside, "files: '../match.onnx' is named by the bundle but not listed"),
        (
            wider_than_its_target,
            "draft: its features, dtype, width and capacity are (8, 'float32', 17, 136), and those of its target "
            "(8, 'float32', 16, 136)",
        ),
        (without_generation_defaults, "Manifest: key 'generation_defaults' is missing"),
        (defaults_in_a_list, "Manifest.generation_defaults: got list, expected dict"),
        (default_in_words, "Manifest.generation_defaults.temperature: got str, expected float"),
        (default_of_none, "Manifest.generation_defaults.top_p: got NoneType, expected float"),
        (default_of_yes, "Manifest.generation_defaults.top_k: got bool, expected float"),
        (nested_default, "Manifest.generation_defaults.min_p: got dict, expected float"),
        (unlisted_tokenizer, "files: 'tokenizer.json' is named by the bundle but not listed"),
        (unlisted_chat_template, "files: 'tokenizer/chat.jinja' is named by the bundle but not listed"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_manifest_that_contradicts_itself(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = json.loads(json.dumps(to_json(full_manifest())))
    damage(data)
    write(tmp_path, json.dumps(data))
    assert refusal(tmp_path) == f"{tmp_path / MANIFEST_NAME}: {message}; export the bundle again"
