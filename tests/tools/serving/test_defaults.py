"""Sampling defaults: temperature 1 unless a generation config sets it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.runtime.runtime import load
from specrt.serving.defaults import sampling_defaults
from specrt.serving.metrics import check_prefix
from specrt.serving.protocol.requests import Defaults
from specrt.serving.service import Config, Service
from tests.tools.serving.serving import serving


@pytest.fixture
def manifest(parrot_bundle: Path) -> Manifest:
    return manifest_from_bundle(parrot_bundle)


def test_where_they_come_from(manifest: Manifest, tmp_path: Path) -> None:
    own = replace(manifest, generation_defaults={"temperature": 0.6, "top_k": 20.0})
    assert sampling_defaults("auto", manifest) == {"temperature": 1.0}
    assert sampling_defaults("auto", own) == {"temperature": 0.6, "top_k": 20}
    assert sampling_defaults("none", own) == {"temperature": 1.0}
    file = tmp_path / "generation_config.json"
    for content, expected in (
        ({"top_p": 0.8, "eos_token_id": 5}, {"temperature": 1.0, "top_p": 0.8}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
    ):
        file.write_text(json.dumps(content))
        assert sampling_defaults(str(file), own) == sampling_defaults(str(tmp_path), own) == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": -1}', '{"top_k": "x"}'])
def test_a_file_that_is_none(content: str, manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(UsageError, match=r"^--generation-config: "):
        sampling_defaults(str(tmp_path / "c.json"), manifest)


def test_a_request_overrides_them(parrot_bundle: Path) -> None:
    config = Config(["parrot"], defaults=Defaults({"temperature": 0.0}, reproducible=True))
    with serving(lambda: Service(load(parrot_bundle), config)) as served:

        def drawn(**body: Any) -> set[str]:
            body = {"prompt": "ab", "max_tokens": 12, "n": 6, **body}
            return {choice["text"] for choice in served.post("/v1/completions", **body).json()["choices"]}

        assert len(drawn()) == 1 and len(drawn(temperature=1.5)) == 6


def test_prefixes_of_metrics() -> None:
    for prefix in ("", "vllm:", "specrt_"):
        check_prefix(prefix)
    with pytest.raises(UsageError, match=r"^--metrics-prefix"):
        check_prefix("a b")
