"""The target of a bundle exported again: the same graph, for each option of ``specrt export`` that changes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.engines.manifest import manifest_from_bundle
from specrt.exporter.again import options_again
from specrt.exporter.export import export
from specrt.exporter.options import ExportOptions
from specrt.exporter.parity.reference import graph_logits
from tests.exports import Exports

# Options that are not of the target's graph: of the draft, of the place, or of a head for this target.
OTHERS = {
    *("draft", "draft_dtype", "draft_quantize", "draft_vocab", "draft_revision", "taps", "norm", "feature_taps"),
    *("output", "force", "trust_remote_code"),
}
DEFAULTS = {"device"}  # it chooses the dtype where none is given
SOURCE = {"target", "revision", "adapter", "adapter_revision", "no_adapter"}  # see also test_adapters.py
CASES: dict[str, dict[str, Any]] = {
    "num_speculative_tokens": {"num_speculative_tokens": 6},
    "max_seq_len": {"max_seq_len": 64},
    "prefill_chunk": {"prefill_chunk": 24},
    "dtype": {"dtype": "fp16"},
    "quantize": {"quantize": "w8a8"},
    "block_size": {"quantize": "int8", "block_size": 128},
    "block_size of int4": {"quantize": "int4", "block_size": 32},
    "device": {"quantize": "int4", "block_size": 64, "device": "cuda"},
    "backend": {"backend": "tensorrt-rtx", "quantize": "int8", "dtype": "bf16"},
    "tensorrt_version": {"backend": "tensorrt", "tensorrt_version": "10.3"},
}
ALL: dict[str, Any] = {"quantize": "int4", "block_size": 64, "device": "cuda", "max_seq_len": 96, "prefill_chunk": 24}


def logits_of(bundle: Path) -> Any:
    entry = manifest_from_bundle(bundle).target
    ids = np.load(bundle / entry.reference)["ids"][: entry.spec.max_seq_len]
    return graph_logits(bundle / entry.graph, entry.spec, ids, threads=1, prepack=True)


def spec_of(bundle: Path) -> Any:
    return dataclasses.replace(manifest_from_bundle(bundle).target.spec, feature_size=None)


def test_every_option_is_of_one_kind() -> None:
    """An option that is added to the export must be here, and in ``options_again`` if it changes the target's graph."""
    names = {field.name for field in dataclasses.fields(ExportOptions)}
    assert names == OTHERS | DEFAULTS | SOURCE | {name for options in CASES.values() for name in options}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ALL, id="together"),
        *(pytest.param(options, id=name, marks=pytest.mark.slow) for name, options in CASES.items()),
    ],
)
def test_the_graph_is_the_same(options: dict[str, Any], exports: Exports, tmp_path: Path) -> None:
    given = exports.bundle(exports.model(), **options)
    again = options_again(given, tmp_path / "again", feature_taps=(1,))
    asked = ExportOptions(str(exports.model()), given, **{"num_speculative_tokens": 4, **options})
    for name in CASES.keys() & {"dtype", "quantize", "backend", "num_speculative_tokens"}:
        assert getattr(again, name) == getattr(asked, name)
    assert (again.dialect, again.block_size or 32) == (asked.dialect, asked.block_size or 32)
    export(again)
    assert spec_of(given) == spec_of(tmp_path / "again")
    if asked.dialect == "onnxruntime":
        assert np.array_equal(logits_of(given), logits_of(tmp_path / "again"))
    first, second = (manifest_from_bundle(folder).target for folder in (given, tmp_path / "again"))
    assert (first.quantization, first.parity.mean_kl) == (second.quantization, second.parity.mean_kl)


def test_other_blocks_are_other_logits(exports: Exports) -> None:
    """The control: what is compared depends on the option that a manifest does not name."""
    sizes = {name: value for name, value in ALL.items() if name not in ("block_size", "max_seq_len", "prefill_chunk")}
    other = exports.bundle(exports.model(), max_seq_len=96, prefill_chunk=24, **sizes)
    found, expected = logits_of(exports.bundle(exports.model(), **ALL)), logits_of(other)
    assert np.abs(found - expected).max() > 0.05 * np.abs(expected).max()
