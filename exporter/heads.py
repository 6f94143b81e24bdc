"""The accept heads as ONNX graphs. Their oracles are in numpy (``specrt.engines.fake.match``)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specrt.engines.spec import INPUT_IDS, LOGITS, NUM_ACCEPTED, ROW_INDICES, ROWS, TOKENS, WIDTH

OPSET = 18
IR_VERSION = 10


def match_head() -> onnx.ModelProto:
    """``match``: accept while the next drafted id is the target's own argmax.

    Row ``i``'s token is judged against the id fed at row ``i + 1``; the last row has none: a sentinel of -1 ends every
    comparison and full acceptance needs no branch. ArgMax takes the first maximum, as numpy does.
    """
    nodes = [
        helper.make_node("ArgMax", [LOGITS], [TOKENS], axis=-1, keepdims=0),  # [R]
        helper.make_node("Squeeze", [INPUT_IDS, "axis_0"], ["fed"]),  # [W]
        helper.make_node("Gather", ["fed", ROW_INDICES], ["row_ids"]),  # [R]
        helper.make_node("Slice", ["row_ids", "one", "end", "axis_0"], ["next_ids"]),  # [R - 1]
        helper.make_node("Concat", ["next_ids", "sentinel"], ["drafted"], axis=0),  # [R]
        helper.make_node("Equal", [TOKENS, "drafted"], ["hit"]),
        helper.make_node("Not", ["hit"], ["miss"]),
        helper.make_node("Cast", ["miss"], ["miss_int"], to=TensorProto.INT32),
        helper.make_node("ArgMax", ["miss_int"], [NUM_ACCEPTED], axis=0, keepdims=1),  # [1]
    ]
    constants = {"axis_0": [0], "one": [1], "end": [np.iinfo(np.int64).max], "sentinel": [-1]}
    graph = helper.make_graph(
        nodes,
        "match",
        inputs=[
            helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, [ROWS, "vocab_size"]),
            helper.make_tensor_value_info(INPUT_IDS, TensorProto.INT64, [1, WIDTH]),
            helper.make_tensor_value_info(ROW_INDICES, TensorProto.INT64, [ROWS]),
        ],
        outputs=[
            helper.make_tensor_value_info(TOKENS, TensorProto.INT64, [ROWS]),
            helper.make_tensor_value_info(NUM_ACCEPTED, TensorProto.INT64, [1]),
        ],
        initializer=[numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model, full_check=True)
    return model
