"""Reports name models by hub id or file name, and no folder of the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrt.tools.bench.records import Bench
from specrt.tools.report.folders import without_folders
from specrt.tools.report.report import report_html

HOME = str(Path.home())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/ann/models/x.gguf", "x.gguf"),
        (f"{HOME}/.cache/models/small", "small"),
        ("~/models/small: not found", "small: not found"),
        ("C:\\models\\ann\\x.onnx", "x.onnx"),
        ("eager: no file '/mnt/a/b', expected \"/srv/c\"", "eager: no file 'b', expected \"c\""),
        ("org/model", "org/model"),
        ("models/small and ../small", "models/small and ../small"),
        ("http://127.0.0.1:8000/v1 gives 12 tokens/s", "http://127.0.0.1:8000/v1 gives 12 tokens/s"),
        ("1 / 2, <br/></p>", "1 / 2, <br/></p>"),
    ],
)
def test_an_absolute_path_becomes_its_last_part(text: str, expected: str) -> None:
    assert without_folders(text) == expected
    assert without_folders({text: [text, (text, 1)]}) == {text: [expected, (expected, 1)]}


def test_files_of_a_bench_name_no_folder(benched: Bench, tmp_path: Path) -> None:
    """Neither of the models, nor of an option, nor of a message."""
    place = tmp_path / "models" / "big.gguf"
    settings = replace(benched.settings, sources={"target": str(place)})
    changes: dict[str, Any] = {"skipped": (f"prompt of {place}",), "failed": {"eager": f"no file {place}"}}
    bench = replace(benched, settings=settings, started={"plain": {"kernels": str(place)}}, **changes)
    assert str(tmp_path) in report_html(bench, []) and str(tmp_path) in str(bench.as_dict())
    for text in (str(bench.for_files().as_dict()), report_html(bench.for_files(), [])):
        assert "big.gguf" in text
        assert (
            HOME not in text and str(tmp_path) not in text and str(Path(benched.sources["target"]).parent) not in text
        )
