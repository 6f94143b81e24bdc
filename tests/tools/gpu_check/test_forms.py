"""The forms of the kit give what the operator gives, as a bundle's graph too."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from specrt.engines.contract import model_contract
from specrt.engines.interface import Array
from specrt.engines.manifest import manifest_from_bundle
from specrt.engines.ort.cpu import OrtEngine
from specrt.tools.gpu_check.experiments.logits import feed
from specrt.tools.gpu_check.forms import AS_EXPORTED, FORMS, KIT_FORMS
from specrt.tools.gpu_check.rewrite import rewrite_attention


def logits_of(bundle: Path) -> Array:
    entry = manifest_from_bundle(bundle).target
    ids = np.load(bundle / entry.reference)["ids"]
    binding = OrtEngine(bundle / entry.graph, model_contract(entry.spec), threads=1).open()
    return feed(binding, ids, [4, 1, 3, 2, 4])


def operators(graph: Path) -> list[str]:
    return [node.op_type for node in onnx.load(graph, load_external_data=False).graph.node]


@pytest.mark.parametrize("form", KIT_FORMS)
def test_a_form_is_the_operator(form: str, tiny_tensorrt_bundle: Path, tmp_path: Path) -> None:
    expected = logits_of(tiny_tensorrt_bundle)
    bundle = Path(shutil.copytree(tiny_tensorrt_bundle, tmp_path / "bundle"))
    entry = manifest_from_bundle(bundle).target
    before = operators(bundle / entry.graph)
    assert rewrite_attention(bundle / entry.graph, FORMS[KIT_FORMS[form]]) == len(entry.spec.kv_layers)
    found = logits_of(bundle)
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()
    after = operators(bundle / entry.graph)
    if form == AS_EXPORTED:
        assert sorted(after) == sorted(before), "what export writes is the form of this name"
    elif form == "operator":
        num_layers = len(entry.spec.kv_layers)
        assert before.count("Reshape") - after.count("Reshape") == 2 * num_layers
    else:
        assert "Attention" not in after
