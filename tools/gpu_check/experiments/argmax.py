"""What a library's own ArgMax gives for ties. The samplers do without it, since no library promises the first."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrt.engines.contract import CAPACITY, ROWS, WIDTH, Contract, TensorSpec
from specrt.engines.interface import Array
from specrt.engines.trt.build import build_alone
from specrt.engines.trt.engine import TrtBackend
from specrt.tools.gpu_check.experiments.places import Place

NUM_COLUMNS, NUM_ROWS = 4096, 8
# A graph of one ArgMax from logits [rows, 4096], float32, to ids [rows], in opset 13
ARGMAX = bytes.fromhex(
    "080812003a770a3c0a066c6f67697473120369647322064172674d61782a140a046178697318ffffffffffffffffff01a001022a0f0a086b6565"
    "7064696d731800a001021201675a1d0a066c6f6769747312130a110801120d0a061204726f77730a0308802062150a03696473120e0a0c080712"
    "080a061204726f777342040a00100d"
)
_GRAPH = "samplers/argmax.onnx"
_CONTRACT = Contract(
    (TensorSpec("logits", "float32", (ROWS, NUM_COLUMNS)),),
    (TensorSpec("ids", "int64", (ROWS,)),),
    {WIDTH: 1, ROWS: 8, CAPACITY: 1},
)


def argmax_of(place: Place) -> dict[str, Any]:
    """How many rows with ties name the first of equals, and what a row that is -inf throughout names."""
    path = place.bundle / _GRAPH
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(ARGMAX)
    if isinstance(place.backend, TrtBackend):
        entry = build_alone(place.name, place.bundle, _GRAPH, _CONTRACT)
        place.backend.record.engines["argmax"] = entry
    binding = place.backend.load(_GRAPH, _CONTRACT).open()
    logits = _ties()
    binding.write("logits", logits)
    binding.run(1, NUM_ROWS)
    found = binding.read("ids")[0]
    binding.close()
    return {
        "rows with ties": NUM_ROWS - 1,
        "of which name the first": int((found == logits.argmax(axis=-1))[:-1].sum()),
        "a row of -inf names": int(found[-1]),
    }


def _ties() -> Array:
    """Rows of few values; one that is equal throughout; two whose largest are far apart; one of -inf. [8, 4096] f32"""
    logits = np.random.default_rng(5).integers(0, 3, (NUM_ROWS, NUM_COLUMNS)).astype(np.float32)
    logits[4], logits[5, [7, 4000]], logits[6, [2047, 2048]], logits[7] = 1, 9, 9, -np.inf
    return logits
