"""Within an export a GGUF file's metadata is parsed once, and again when the file has changed."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from specrt.exporter.sources.parsed_once import gguf_parsed_once


def write_gguf(path: Path, name: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(name)
    writer.add_tensor("t", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_of(path: Path) -> str:
    return str(gguf.GGUFReader(str(path)).fields["general.name"].contents())


def test_a_file_is_parsed_once_until_it_changes(tmp_path: Path) -> None:
    path, before = tmp_path / "m.gguf", gguf.GGUFReader
    write_gguf(path, "first")
    with gguf_parsed_once():
        assert gguf.GGUFReader(str(path)) is gguf.GGUFReader(path)
        assert name_of(path) == "first"
        path.unlink()
        write_gguf(path, "another")
        assert name_of(path) == "another"
    assert gguf.GGUFReader is before
    with gguf_parsed_once():
        assert name_of(path) == "another"
