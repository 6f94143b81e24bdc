"""``bundle.json``: written and read back; each kind of damage is one line that says what and how to mend it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.codec import to_json
from specrt.engines.errors import BundleError
from specrt.engines.fake import fake_spec
from specrt.engines.heads import HEAD_NAMES
from specrt.engines.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    DraftEntry,
    FileEntry,
    Manifest,
    ModelEntry,
    Parity,
    TokenizerEntry,
    manifest_from_bundle,
    manifest_text,
)
from specrt.engines.spec import model_contract


def model_entry(folder: str, heads: str) -> ModelEntry:
    spec = fake_spec()
    contract = model_contract(spec)
    return ModelEntry(
        source=f"somebody/{folder}",
        revision=None,
        architecture="LlamaForCausalLM",
        graph=f"{folder}/model.onnx",
        spec=spec,
        inputs=contract.inputs,
        outputs=contract.outputs,
        weights_bytes=1 << 20,
        bytes_per_pass=1 << 19,
        reference=f"{folder}/reference.npz",
        parity=Parity(8, 1e-5, 20.0, 1.0),
        heads={name: f"{heads}/{name}.onnx" for name in HEAD_NAMES},
    )


def full_manifest() -> Manifest:
    """A target and a draft model with heads of its own: every key of the schema has a value."""
    target, draft = model_entry("target", "heads"), model_entry("draft", "heads/draft")
    models = [name for model in (target, draft) for name in (model.graph, model.reference, *model.heads.values())]
    names = (*models, "tokenizer/tokenizer.json", "tokenizer/chat.jinja")
    return Manifest(
        schema_version=SCHEMA_VERSION,
        specrt_version="0.1.0",
        created_utc="2026-01-01T00:00:00Z",
        versions={"torch": "2.13.0"},
        backends=("onnxruntime",),
        num_speculative_tokens=8,
        eos_token_ids=(2, 7),
        target=target,
        draft=DraftEntry("model", draft),
        generation_defaults={"temperature": 0.6, "top_k": 20.0},
        tokenizer=TokenizerEntry("tokenizer/tokenizer.json", "tokenizer/chat.jinja", "<s>", None),
        files={name: FileEntry(10, "0" * 64) for name in names},
    )


def write(bundle: Path, text: str) -> None:
    (bundle / MANIFEST_NAME).write_text(text, encoding="utf-8")


def refusal(bundle: Path) -> str:
    """The message with which reading ``bundle`` is refused; it is one line that names the bundle."""
    with pytest.raises(BundleError) as caught:
        manifest_from_bundle(bundle)
    message = str(caught.value)
    assert message.startswith(str(bundle))
    assert len(message.splitlines()) == 1
    return message


def without_draft_model(manifest: Manifest, kind: str) -> Manifest:
    return dataclasses.replace(manifest, draft=DraftEntry(kind, None))


@pytest.mark.parametrize(
    "manifest",
    [full_manifest(), without_draft_model(full_manifest(), "ngram"), without_draft_model(full_manifest(), "self")],
    ids=lambda manifest: manifest.draft.kind,
)
def test_what_is_written_is_read_back_equal(tmp_path: Path, manifest: Manifest) -> None:
    write(tmp_path, manifest_text(manifest))
    assert manifest_from_bundle(tmp_path) == manifest


def test_models_may_share_heads(tmp_path: Path) -> None:
    manifest = full_manifest()
    assert manifest.draft.model is not None
    draft = dataclasses.replace(manifest.draft.model, heads=manifest.target.heads)
    files = {name: entry for name, entry in manifest.files.items() if not name.startswith("heads/draft/")}
    shared = dataclasses.replace(manifest, draft=DraftEntry("model", draft), files=files)
    write(tmp_path, manifest_text(shared))
    assert manifest_from_bundle(tmp_path) == shared


@pytest.mark.parametrize(("defaults", "expected"), [({}, {}), ({"temperature": 0, "top_k": 50}, [0.0, 50.0])])
def test_generation_defaults_are_numbers(tmp_path: Path, defaults: dict[str, Any], expected: Any) -> None:
    """Whole ones too, as another program may write them."""
    data = json.loads(manifest_text(full_manifest()))
    write(tmp_path, json.dumps({**data, "generation_defaults": defaults}))
    found = manifest_from_bundle(tmp_path).generation_defaults
    assert found == dict(zip(defaults, expected, strict=True))
    assert {type(value) for value in found.values()} <= {float}


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "no such bundle folder" in refusal(tmp_path / "absent")


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    assert f"{MANIFEST_NAME} is missing" in refusal(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_manifest(tmp_path: Path, share: float) -> None:
    text = manifest_text(full_manifest())
    write(tmp_path, text[: int(len(text) * share)])
    assert "not readable as JSON" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 100_000], ids=["not utf-8", "nested too deep"])
def test_a_manifest_that_is_no_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    assert "not readable as JSON" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}"])
def test_a_manifest_without_a_schema_version(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert "schema version None" in refusal(tmp_path)


@pytest.mark.parametrize("version", [0, 1, SCHEMA_VERSION + 1, str(SCHEMA_VERSION), True, None])
def test_an_unknown_schema_version_is_refused_before_its_keys_are_read(tmp_path: Path, version: object) -> None:
    write(tmp_path, json.dumps({"schema_version": version, "unheard_of": 1}))
    assert f"schema version {version!r}, this specrt reads {SCHEMA_VERSION}" in refusal(tmp_path)


def _as_schema(manifest: Manifest, version: int) -> dict[str, Any]:
    """What an older specrt wrote of a manifest that it could write."""
    data: dict[str, Any] = json.loads(manifest_text(manifest))
    for model in (data["target"], data["draft"]["model"]):
        del model["spec"]["num_input_ids"]
        if version < 3:
            del model["spec"]["dialect"]
    del data["draft"]["shares_kv"]
    return {**data, "schema_version": version}


@pytest.mark.parametrize("version", [2, 3])
def test_a_bundle_of_an_older_schema_is_what_it_was(tmp_path: Path, version: int) -> None:
    write(tmp_path, json.dumps(_as_schema(full_manifest(), version)))
    assert manifest_from_bundle(tmp_path) == dataclasses.replace(full_manifest(), schema_version=version)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("key", ["target", "draft"])
def test_a_damaged_bundle_of_an_older_schema(tmp_path: Path, key: str, version: int) -> None:
    data = _as_schema(full_manifest(), version)
    del data[key]
    write(tmp_path, json.dumps(data))
    assert "a key is missing or of another type" in refusal(tmp_path)


def test_an_older_schema_has_none_of_the_newer_keys(tmp_path: Path) -> None:
    data = _as_schema(full_manifest(), 3)
    data["draft"]["shares_kv"] = True
    write(tmp_path, json.dumps(data))
    assert "unknown key 'shares_kv'" in refusal(tmp_path)


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


def heads_of_the_bundle(data: dict[str, Any]) -> None:
    data["heads"] = {"match": "heads/match.onnx"}


def model_without_heads(data: dict[str, Any]) -> None:
    del data["target"]["heads"]


def missing_head(data: dict[str, Any]) -> None:
    del data["target"]["heads"]["nucleus"]


def missing_head_of_the_draft(data: dict[str, Any]) -> None:
    del data["draft"]["model"]["heads"]["block"]


def no_heads(data: dict[str, Any]) -> None:
    data["target"]["heads"] = {}


def heads_in_a_list(data: dict[str, Any]) -> None:
    data["target"]["heads"] = ["heads/match.onnx"]


def head_without_a_path(data: dict[str, Any]) -> None:
    data["draft"]["model"]["heads"]["token"] = None


def unlisted_head(data: dict[str, Any]) -> None:
    del data["files"]["heads/block.onnx"]


def unlisted_head_of_the_draft(data: dict[str, Any]) -> None:
    data["draft"]["model"]["heads"]["match"] = "heads/mine.onnx"


def unlisted_head_of_another_name(data: dict[str, Any]) -> None:
    data["target"]["heads"]["guess"] = "heads/guess.onnx"


def head_outside(data: dict[str, Any]) -> None:
    data["target"]["heads"]["match"] = "../match.onnx"


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
        (heads_of_the_bundle, "Manifest: unknown key 'heads'"),
        (model_without_heads, "Manifest.target: key 'heads' is missing"),
        (missing_head, "target/model.onnx: its head 'nucleus' is missing"),
        (missing_head_of_the_draft, "draft/model.onnx: its head 'block' is missing"),
        (no_heads, "target/model.onnx: its head 'block' is missing"),
        (heads_in_a_list, "Manifest.target.heads: got list, expected dict"),
        (head_without_a_path, "Manifest.draft.model.heads.token: got NoneType, expected str"),
        (unlisted_head, "files: 'heads/block.onnx' is named by the bundle but not listed"),
        (unlisted_head_of_the_draft, "files: 'heads/mine.onnx' is named by the bundle but not listed"),
        (unlisted_head_of_another_name, "files: 'heads/guess.onnx' is named by the bundle but not listed"),
        (head_outside, "files: '../match.onnx' is named by the bundle but not listed"),
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
