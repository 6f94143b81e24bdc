"""The reader that transformers is given reads what gguf's own does."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np

from specrt.exporter.sources.gguf.reader import quick_reader
from tests.exporter.sources.gguf.gguf_models import write_gguf
from tests.exporter.tracing.architectures import tiny_model


def test_fields_and_tensors_are_those_of_gguf_s_reader(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny_model("llama"), "llama")
    expected = gguf.GGUFReader(tmp_path / "model.gguf")
    with quick_reader():
        found = gguf.GGUFReader(tmp_path / "model.gguf")
    assert (type(expected.data), type(found.data)) == (np.memmap, np.ndarray)
    assert {name: field.contents() for name, field in found.fields.items()} == {
        name: field.contents() for name, field in expected.fields.items()
    }
    assert len(found.tensors) == len(expected.tensors) > 10
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert (one.name, one.tensor_type, one.shape.tolist()) == (other.name, other.tensor_type, other.shape.tolist())
        assert np.array_equal(one.data, other.data)


def test_gguf_is_as_before_after_the_block() -> None:
    before, arguments = (gguf.GGUFReader, gguf.get_tensor_name_map), (gguf.MODEL_ARCH.LLAMA, 3)
    with quick_reader():
        assert gguf.get_tensor_name_map(*arguments) is gguf.get_tensor_name_map(*arguments)
        assert gguf.get_tensor_name_map(*arguments).mapping == before[1](*arguments).mapping
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    with suppress(KeyError), quick_reader():
        raise KeyError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
