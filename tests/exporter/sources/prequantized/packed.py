"""Files of quantized weights, written from known integers by slow, literal packing: one value after another."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specrt.engines.interface import Array
from tests.tiny import save_tiny_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words_of(values: Iterable[int], bits: int, crossing: bool) -> list[int]:
    """Unsigned words of 32 bits, the first value lowest; with ``crossing`` a value may continue in the next word."""
    values = list(values)
    if crossing:
        stream = sum(int(value) << (bits * index) for index, value in enumerate(values))
        assert len(values) * bits % 32 == 0
        return [(stream >> (32 * index)) & 0xFFFFFFFF for index in range(len(values) * bits // 32)]
    count = 32 // bits
    parts = [values[start : start + count] for start in range(0, len(values), count)]
    return [sum(int(value) << (bits * index) for index, value in enumerate(part)) for part in parts]


def as_words(rows: Iterable[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(list(rows), np.uint32).view(np.int32))


@dataclass(frozen=True)
class Levels:
    """A weight [N, K] as integers: ``q`` [N, K] and, by group, ``zeros`` and ``scales`` [N, G]; ``group`` [K]."""

    q: Array
    zeros: Array
    scales: Array
    group: Array

    def weight(self) -> Array:
        """By the formula, one value at a time, in float64."""
        rows, columns = self.q.shape
        return np.array(
            [
                [
                    float(self.scales[n, self.group[k]]) * (int(self.q[n, k]) - int(self.zeros[n, self.group[k]]))
                    for k in range(columns)
                ]
                for n in range(rows)
            ]
        )


def random_levels(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    size: int,
    bits: int = 4,
    symmetric: bool = False,
    scattered: bool = False,
) -> Levels:
    """Random integers; ``size`` -1 is one group. Scales are what fp16 holds."""
    num_groups = 1 if size == -1 else columns // size
    group = np.arange(columns) // (columns // num_groups)
    top = 1 << bits
    zeros = np.full((rows, num_groups), top // 2) if symmetric else rng.integers(1, top, (rows, num_groups))
    scales = rng.uniform(0.01, 0.1, (rows, num_groups)).astype(np.float16)
    return Levels(rng.integers(0, top, (rows, columns)), zeros, scales, rng.permutation(group) if scattered else group)


def gptq_parts(levels: Levels, bits: int, less_one: int = 1, with_order: bool = True) -> dict[str, torch.Tensor]:
    parts = {
        "qweight": as_words(words_of(row, bits, True) for row in levels.q).T.contiguous(),
        "qzeros": as_words(words_of((column - less_one) % (1 << bits), bits, True) for column in levels.zeros.T),
        "scales": torch.from_numpy(levels.scales.T.copy()),
    }
    return {**parts, "g_idx": torch.from_numpy(levels.group.astype(np.int32))} if with_order else parts


def awq_parts(levels: Levels) -> dict[str, torch.Tensor]:
    def packed(columns: Array) -> torch.Tensor:
        """[R, N] -> [R, N / 8]"""
        eights = columns.reshape(len(columns), -1, 8)
        return as_words(
            [word for eight in row for word in words_of([eight[i] for i in AWQ_ORDER], 4, False)] for row in eights
        )

    return {
        "qweight": packed(levels.q.T),
        "qzeros": packed(levels.zeros.T),
        "scales": torch.from_numpy(levels.scales.T.copy()),
    }


def packed_parts(levels: Levels, bits: int, symmetric: bool, with_order: bool) -> dict[str, torch.Tensor]:
    """compressed-tensors, pack-quantized. Its integers are signed, and stored raised by half their range: as here."""
    parts = {
        "weight_packed": as_words(words_of(row, bits, False) for row in levels.q),
        "weight_scale": torch.from_numpy(levels.scales.copy()),
        "weight_shape": torch.tensor(levels.q.shape),
    }
    if not symmetric:
        zeros = as_words(words_of(column, bits, False) for column in levels.zeros.T)
        parts["weight_zero_point"] = zeros.T.contiguous()
    if with_order:
        parts["weight_g_idx"] = torch.from_numpy(levels.group.astype(np.int32))
    return parts


class Stored:
    """A ``Checkpoint`` of tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.tensors))

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def save_quantized(
    folder: Path, make: Any, settings: dict[str, Any], file: str | None = None, **overrides: Any
) -> dict[str, Array]:
    """A tiny model whose linear weights are ``make(shape) -> (parts, weight)``; return the float weights by name.

    ``settings`` go into config.json, or into ``file`` next to it.
    """
    save_tiny_model(folder, **overrides)
    tensors, weights = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in LINEAR:
            tensors[name] = tensor
            continue
        parts, weights[name] = make(tuple(tensor.shape))
        tensors |= {f"{module}.{part}": value for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if file is not None:
        (folder / file).write_text(json.dumps(settings))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return weights
