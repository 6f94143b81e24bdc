"""``bundle.json``: written and read back; each kind of damage gives one line with the cause and the fix."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.contract import model_contract
from specrt.engines.errors import BundleError
from specrt.engines.experts import Experts
from specrt.engines.fake import fake_spec
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
from specrt.engines.samplers import SAMPLER_NAMES


def model_entry(folder: str, samplers: str) -> ModelEntry:
    spec = fake_spec()
    contract = model_contract(spec)
    return ModelEntry(
        source=f"somebody/{folder}",
        revision=None,
        fingerprint="0" * 64,
        architecture="LlamaForCausalLM",
        graph=f"{folder}/model.onnx",
        spec=spec,
        inputs=contract.inputs,
        outputs=contract.outputs,
        weights_bytes=1 << 20,
        bytes_per_pass=1 << 19,
        reference=f"{folder}/reference.npz",
        parity=Parity(8, 1e-5, 20.0, 1.0),
        samplers={name: f"{samplers}/{name}.onnx" for name in SAMPLER_NAMES},
    )


def full_manifest() -> Manifest:
    """A target and a draft model with its own samplers: every key of the schema has a value."""
    target, draft = model_entry("target", "samplers"), model_entry("draft", "samplers/draft")
    models = [name for model in (target, draft) for name in (model.graph, model.reference, *model.samplers.values())]
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
        tokenizer=TokenizerEntry("tokenizer/tokenizer.json", "tokenizer/chat.jinja", {"bos_token": "<s>"}, {}, False),
        files={name: FileEntry(10, "0" * 64) for name in names},
    )


def test_experts_are_read_as_they_were_written(tmp_path: Path) -> None:
    manifest = full_manifest()
    manifest = dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, experts=Experts(2, 8, 2, 99)))
    write(tmp_path, manifest_text(manifest))
    read = manifest_from_bundle(tmp_path)
    assert read == manifest
    reads, none = read.target.further_reads, full_manifest().target.further_reads
    assert reads is not None and none is None
    assert reads(1) == 0 and reads(2) == pytest.approx(2 * 99 * 1.5 / (1 << 19), abs=1e-6)
    write(tmp_path, manifest_text(manifest).replace('"experts_per_token": 2', '"experts_per_token": 9'))
    assert "contradictory" in refusal(tmp_path)


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


def test_models_may_share_samplers(tmp_path: Path) -> None:
    manifest = full_manifest()
    assert manifest.draft.model is not None
    draft = dataclasses.replace(manifest.draft.model, samplers=manifest.target.samplers)
    files = {name: entry for name, entry in manifest.files.items() if not name.startswith("samplers/draft/")}
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


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, SCHEMA_VERSION + 1, str(SCHEMA_VERSION), True, None])
def test_an_unknown_schema_version_is_refused_before_its_keys_are_read(tmp_path: Path, version: object) -> None:
    write(tmp_path, json.dumps({"schema_version": version, "unheard_of": 1}))
    assert f"schema version {version!r}, this specrt reads {SCHEMA_VERSION}" in refusal(tmp_path)
