"""The forms whose copies are compared compute the same attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from specrt.tools.gpu_check.forms import FORMS
from specrt.tools.lab.attention_forms import DIM, KV_HEADS, LAYERS, attention_model

CAPACITY, PAST, WIDTH = 24, 7, 3


def output_of(name: str) -> Any:
    session = ort.InferenceSession(
        attention_model(FORMS[name], CAPACITY).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    rng = np.random.default_rng(1)
    feed: dict[str, Any] = {"input_ids": np.array([[3, 5, 8]]), "position_ids": np.arange(PAST, PAST + WIDTH)[None]}
    for layer in range(LAYERS):
        for part in ("key", "value"):
            feed[f"past_{part}.{layer}"] = rng.standard_normal((1, KV_HEADS, CAPACITY, DIM)).astype(np.float16)
    return session.run(None, feed)[0].astype(np.float32)


@pytest.mark.parametrize("name", list(FORMS)[1:])
def test_all_forms_answer_as_the_operator(name: str) -> None:
    expected = output_of("Attention")
    assert np.abs(expected).max() > 0.1
    assert np.abs(output_of(name) - expected).max() / np.abs(expected).max() < 3e-2
