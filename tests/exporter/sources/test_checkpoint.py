"""Files of weights: every format gives the same tensors, and each kind of damage gives one line with the fix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file, save_file

from specrt.engines.errors import SourceError
from specrt.exporter.sources.checkpoint import Checkpoint, GgufCheckpoint, open_checkpoint
from specrt.exporter.sources.source import find_source
from tests.exporter.sources.folders import WEIGHTS, save_model
from tests.tiny import save_tiny_model

POINTER = b"version https://git-lfs.example/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"


def assert_equal(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    assert list(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


def shards(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model in two shards: its index, and all tensors."""
    tensors = load_file(save_model(folder) / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / WEIGHTS).unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}}))
    return index, tensors


def test_safetensors_bin_and_shards_give_the_same_tensors(tmp_path: Path) -> None:
    index, tensors = shards(tmp_path / "sharded")
    assert_equal(open_checkpoint(str(index.parent)), tensors)
    for name, options in (("zip", {}), ("legacy", {"_use_new_zipfile_serialization": False})):
        (tmp_path / name).mkdir()
        torch.save(tensors, tmp_path / name / "pytorch_model.bin", **options)
        assert_equal(open_checkpoint(str(tmp_path / name)), tensors)


def test_gguf_gives_values_as_stored_and_blocks_as_gguf_py_does(tmp_path: Path) -> None:
    """The shapes are not square, so that an order of axes cannot be mistaken."""
    values = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)
    writer = GGUFWriter(tmp_path / "a.GGUF", "llama")
    writer.add_tensor("f32", values)
    writer.add_tensor("f16", values.astype(np.float16))
    writer.add_tensor("stack", values.reshape(2, 3, 64))
    kinds = {"bf16": GGMLQuantizationType.BF16, "q8": GGMLQuantizationType.Q8_0, "q4": GGMLQuantizationType.Q4_1}
    packed = {name: quantize(values, kind) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        writer.add_tensor(name, packed[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(str(tmp_path), {"gguf_file": "a.GGUF"})
    assert isinstance(checkpoint, GgufCheckpoint) and checkpoint.architecture == "llama"
    assert checkpoint.types["q4"] == "Q4_1" and checkpoint.types["f16"] == "F16"
    blocks = {name: torch.from_numpy(dequantize(packed[name], kinds[name])) for name in ("q8", "q4")}
    f32 = torch.from_numpy(values)
    assert_equal(
        checkpoint, {"f32": f32, "f16": f32.half(), "stack": f32.view(2, 3, 64), "bf16": f32.bfloat16(), **blocks}
    )


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def corrupt(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 4096)


def not_a_bin(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK not a zip")


def an_object_in_a_bin(folder: Path) -> None:
    """A pickle that would run code: it is refused, not run."""
    (folder / WEIGHTS).unlink()
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")


def shard_absent(folder: Path) -> None:
    index, _ = shards(folder)
    (index.parent / "model-2-of-2.safetensors").unlink()


def tensor_in_two_shards(folder: Path) -> None:
    index, tensors = shards(folder)
    save_file(tensors, index.parent / "model-2-of-2.safetensors")


def index_without_a_map(folder: Path) -> None:
    index, _ = shards(folder)
    index.write_text("[]")


def no_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "truncated or damaged"),
        (corrupt, "truncated or damaged"),
        (not_a_bin, "truncated or damaged"),
        (an_object_in_a_bin, "truncated or damaged"),
        (shard_absent, "1 of its 2 shards are absent, the first is model-2-of-2.safetensors"),
        (tensor_in_two_shards, "is in another shard too"),
        (index_without_a_map, "not an index of shards"),
        (no_weights, "no weights"),
    ],
)
def test_a_damaged_model_is_one_line(damage: object, message: str, tmp_path: Path) -> None:
    assert callable(damage)
    save_model(tmp_path / "m")
    open_checkpoint(str(tmp_path / "m"))
    damage(tmp_path / "m")
    with pytest.raises(SourceError, match=message) as caught:
        open_checkpoint(str(tmp_path / "m"))
    assert "\n" not in str(caught.value) and "download" in str(caught.value)


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json", "config.json", "m.gguf", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_named_as_one(name: str, tmp_path: Path) -> None:
    """Before anything else is read of it; a pointer among files that are not read is no harm."""
    folder = save_tiny_model(tmp_path / "m")
    (folder / "logo.png").write_bytes(POINTER)
    find_source(str(folder))
    if name == "pytorch_model.bin":
        find_source(str(folder))
        (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(POINTER)
    with pytest.raises(SourceError, match=rf"{name}: a Git-LFS pointer of \d+ bytes.*git lfs pull"):
        find_source(str(folder / name if name.endswith(".gguf") else folder))
