"""Optional files of a hub: only a file that is known to be absent counts as absent; a failed download is an error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import LlamaConfig

from specrt.engines.errors import SourceError
from specrt.exporter.sources.ending import read_generation_config
from specrt.exporter.sources.hub_files import optional_file
from specrt.exporter.sources.source import Source
from tests.exporter.sources.local_hub import Hub, local_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The answers of a local hub, with an empty cache."""
    with local_hub(monkeypatch, tmp_path / "cache") as answers:
        yield answers


def test_a_hub_reports_an_absent_file(hub: dict[str, Any]) -> None:
    hub["generation_config.json"] = 404
    assert read_generation_config("a/b", "a/b", None) is None
    hub["generation_config.json"] = 503  # later: the cache remembers the answer
    assert read_generation_config("a/b", "a/b", None) is None


def test_a_hub_has_the_file(hub: dict[str, Any]) -> None:
    hub["generation_config.json"] = b'{"eos_token_id": [2, 3]}'
    assert read_generation_config("a/b", "a/b", None).eos_token_id == [2, 3]
    hub["generation_config.json"] = 503
    assert read_generation_config("a/b", "a/b", None).eos_token_id == [2, 3]


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_failed_download_is_not_an_absent_file(status: int, hub: dict[str, Any]) -> None:
    """transformers takes each of these for absence."""
    hub["generation_config.json"] = hub["LICENSE"] = status
    with pytest.raises(SourceError, match=r"a/b: generation_config.json could not be fetched") as caught:
        read_generation_config("a/b", "a/b", None)
    assert "\n" not in str(caught.value)
    with pytest.raises(SourceError, match="a/b: LICENSE could not be fetched"):
        Source("a/b", LlamaConfig(), None, "a/b").licenses()


def test_offline_only_what_is_known_to_be_absent_is_absent(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub["generation_config.json"] = 404
    assert optional_file("a/known", "generation_config.json", None, must_know=True) is None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("specrt.exporter.sources.hub_files.is_offline_mode", lambda: True)
    assert optional_file("a/known", "generation_config.json", None, must_know=True) is None
    with pytest.raises(SourceError, match="could not be fetched"):
        optional_file("a/new", "generation_config.json", None, must_know=True)
    assert optional_file("a/new", "LICENSE", None) is None  # no answer depends on it


def test_a_listing_of_the_repository_shows_absent_files(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """snapshot_download keeps one."""
    folder = tmp_path / "cache" / "models--a--b"
    (folder / "trees").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(Hub.commit)
    files = {"config.json": {"size": 1, "blob_id": "0"}}
    (folder / "trees" / f"{Hub.commit}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    hub["generation_config.json"] = hub["config.json"] = 503
    assert optional_file("a/b", "generation_config.json", None, must_know=True) is None
    with pytest.raises(SourceError, match=r"config\.json could not be fetched"):
        optional_file("a/b", "config.json", None)
