"""Attention as matmuls over groups gives what the operator gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from specrt.engines.contract import model_contract
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.ort.cpu import OrtEngine
from specrt.tools.gpu_check.experiments.logits import feed
from specrt.tools.gpu_check.folded import fold_attention


def test_the_folded_form_is_the_operator(tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle"))
    entry = manifest_from_bundle(bundle).target
    ids = np.load(bundle / entry.reference)["ids"]
    found = []
    for is_folded in (False, True):
        if is_folded:
            assert fold_attention(bundle / entry.graph) == len(entry.spec.kv_layers)
        binding = OrtEngine(bundle / entry.graph, model_contract(entry.spec), threads=1).open()
        found.append(feed(binding, ids, [4, 1, 3, 2, 4]))
    assert np.abs(found[0] - found[1]).max() < 0.01 * np.abs(found[0]).max()
    assert not np.array_equal(found[0], found[1])
