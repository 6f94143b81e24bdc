"""ONNX Runtime behind the seam, on a one-layer model that is made here, and the match head against its oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from onnx import TensorProto, helper, numpy_helper

from specrt.engines import oracle
from specrt.engines.errors import BundleError
from specrt.engines.heads import HEAD_NAMES, MATCH, head_contract
from specrt.engines.ort import OrtBinding, OrtEngine
from specrt.engines.seam import Array, Binding
from specrt.engines.spec import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOKENS,
    TOTAL_SEQUENCE_LENGTH,
    KVLayer,
    ModelSpec,
    TensorSpec,
    model_contract,
    past_name,
    plan_buffers,
    present_name,
)
from specrt.exporter.heads import head_graph

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN = NUM_HEADS * HEAD_DIM
SPEC = ModelSpec(
    vocab_size=32,
    max_seq_len=90,
    capacity=99,
    max_width=72,
    max_rows=9,
    dtype="float32",
    kv_layers=(KVLayer(NUM_KV_HEADS, HEAD_DIM),),
)
KEY, VALUE = past_name("key", 0), past_name("value", 0)
TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}


@dataclass(frozen=True)
class Weights:
    """Embeddings of tokens and positions, projections, and the unembedding; all f32."""

    token: Array  # [V, H]
    position: Array  # [capacity, H]
    query: Array  # [H, H]
    key: Array  # [H, kv]
    value: Array  # [H, kv]
    output: Array  # [H, V]


def make_weights() -> Weights:
    rng = np.random.default_rng(0)
    kv = NUM_KV_HEADS * HEAD_DIM
    shapes = [(SPEC.vocab_size, HIDDEN), (SPEC.capacity, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, kv), (HIDDEN, kv)]
    shapes.append((HIDDEN, SPEC.vocab_size))
    return Weights(*(rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes))


WEIGHTS = make_weights()


def value_info(tensor: TensorSpec) -> Any:
    return helper.make_tensor_value_info(tensor.name, TYPES[tensor.dtype], tensor.shape)


def make_model() -> onnx.ModelProto:
    """Token and position embeddings, one GroupQueryAttention, the rows asked for, the unembedding."""
    attention = [KEY, VALUE, SEQLENS_K, TOTAL_SEQUENCE_LENGTH]
    present = [present_name("key", 0), present_name("value", 0)]
    nodes = [
        helper.make_node("Gather", ["token", INPUT_IDS], ["token_rows"]),  # [1, W, H]
        helper.make_node("Gather", ["position", POSITION_IDS], ["position_rows"]),
        helper.make_node("Add", ["token_rows", "position_rows"], ["hidden"]),
        *(helper.make_node("MatMul", ["hidden", name], [name[0]]) for name in ("query", "key", "value")),
        helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", *attention],
            ["attended", *present],
            domain="com.microsoft",
            num_heads=NUM_HEADS,
            kv_num_heads=NUM_KV_HEADS,
        ),
        helper.make_node("Add", ["hidden", "attended"], ["sum"]),
        helper.make_node("Squeeze", ["sum", "axis_0"], ["all_rows"]),  # [W, H]
        helper.make_node("Gather", ["all_rows", ROW_INDICES], ["rows_kept"]),  # [R, H]
        helper.make_node("MatMul", ["rows_kept", "output"], [LOGITS]),  # [R, V]
    ]
    constants = {**vars(WEIGHTS), "axis_0": np.array([0], np.int64)}
    contract = model_contract(SPEC)
    graph = helper.make_graph(
        nodes,
        "tiny",
        inputs=[value_info(tensor) for tensor in contract.inputs],
        outputs=[value_info(tensor) for tensor in contract.outputs],
        initializer=[numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def logits_without_cache(ids: Sequence[int]) -> Array:
    """The model in numpy, causal by a mask over the whole sequence. [T, V]"""
    hidden = WEIGHTS.token[list(ids)] + WEIGHTS.position[: len(ids)]  # [T, H]
    query = (hidden @ WEIGHTS.query).reshape(-1, NUM_HEADS, HEAD_DIM)  # [T, N, D]
    key, value = ((hidden @ w).reshape(-1, NUM_KV_HEADS, HEAD_DIM) for w in (WEIGHTS.key, WEIGHTS.value))
    key, value = (np.repeat(x, NUM_HEADS // NUM_KV_HEADS, axis=1) for x in (key, value))  # [T, N, D]
    scores = np.einsum("qnd,knd->nqk", query, key) / np.sqrt(HEAD_DIM)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    attended = np.einsum("nqk,knd->qnd", weights, value).reshape(len(ids), HIDDEN)
    logits: Array = (hidden + attended) @ WEIGHTS.output
    return logits


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(make_model(), path)
    return path


@pytest.fixture(scope="module")
def engine(graph: Path) -> OrtEngine:
    return OrtEngine(graph, model_contract(SPEC), threads=1)


@pytest.fixture
def binding(engine: OrtEngine) -> Any:
    binding = engine.open(0)
    yield binding
    binding.close()


def feed(binding: Binding, ids: Sequence[int], start: int, rows: int = 1) -> Array:
    """Run one pass of ``ids`` at positions ``start ..``; a copy of the logits of its last ``rows`` rows. [R, V]"""
    width, host = len(ids), binding.host
    host[INPUT_IDS][0, :width] = ids
    host[POSITION_IDS][0, :width] = np.arange(start, start + width)
    host[SEQLENS_K][0], host[TOTAL_SEQUENCE_LENGTH][0] = start + width - 1, start + width
    host[ROW_INDICES][:rows] = np.arange(width - rows, width)
    binding.run(width, rows)
    logits: Array = host[LOGITS][:rows].copy()
    return logits


def some_ids(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, SPEC.vocab_size, count).tolist()
    return ids


# --- what a pass answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("past", [0, 1, 5, 70])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_one_pass_of_rows_is_as_many_passes_of_one_and_the_model_without_cache(
    engine: OrtEngine, past: int, rows: int
) -> None:
    ids = some_ids(past + rows)
    many, single = engine.open(0), engine.open(1)
    try:
        if past:
            feed(many, ids[:past], 0)
        together = feed(many, ids[past:], past, rows)
        one_by_one = np.concatenate([feed(single, [token], place) for place, token in enumerate(ids)])
        np.testing.assert_allclose(together, one_by_one[past:], atol=1e-5)
        np.testing.assert_allclose(together, logits_without_cache(ids)[past:], atol=1e-5)
        np.testing.assert_allclose(many.host[KEY], single.host[KEY], atol=1e-5)
    finally:
        many.close()
        single.close()


def test_rows_are_those_asked_for(binding: OrtBinding) -> None:
    ids = some_ids(12)
    expected = logits_without_cache(ids)[[3, 7, 11]]
    feed(binding, ids, 0)
    binding.host[ROW_INDICES][:3] = [3, 7, 11]
    binding.run(12, 3)
    np.testing.assert_allclose(binding.host[LOGITS][:3], expected, atol=1e-5)


def test_stale_slots_are_overwritten_and_never_read(binding: OrtBinding) -> None:
    ids = some_ids(10)
    feed(binding, ids, 0)
    for name in (KEY, VALUE):
        binding.host[name][:, :, 4:] = 1e4
    np.testing.assert_allclose(feed(binding, ids[4:7], 4, 3), logits_without_cache(ids[:7])[4:], atol=1e-5)
    assert (binding.host[KEY][:, :, :7] < 1e3).all()
    assert (binding.host[KEY][:, :, 7:] == 1e4).all()


def test_two_slots_of_one_engine_do_not_disturb_each_other(engine: OrtEngine) -> None:
    """Turn by turn, with different lengths and widths."""
    sequences = [some_ids(24, seed=1), some_ids(40, seed=2)]
    bindings = [engine.open(slot) for slot in (0, 1)]
    try:
        for turn in range(8):
            for binding, ids, width in zip(bindings, sequences, (3, 5), strict=True):
                start = turn * width
                expected = logits_without_cache(ids[: start + width])[start:]
                np.testing.assert_allclose(feed(binding, ids[start:][:width], start, width), expected, atol=1e-5)
    finally:
        for binding in bindings:
            binding.close()


# --- memory --------------------------------------------------------------------------------------------------------


def test_kv_is_appended_in_place(binding: OrtBinding) -> None:
    """Only the slots of the fed positions change, in the very buffer that the past is read from."""
    before = {name: binding.host[name].copy() for name in (KEY, VALUE)}
    for start, width in ((0, 3), (3, 1), (4, 6)):
        feed(binding, some_ids(width), start)
        for name in (KEY, VALUE):
            changed = (binding.host[name] != before[name]).any(axis=(0, 1, 3))  # [capacity]
            assert np.flatnonzero(changed).tolist() == list(range(start, start + width))
            before[name] = binding.host[name].copy()


def test_buffers_stay_where_they_are_and_are_those_of_the_plan(binding: OrtBinding) -> None:
    plan = plan_buffers(model_contract(SPEC))
    assert {name: (array.shape, str(array.dtype)) for name, array in binding.host.items()} == {
        buffer.name: (buffer.shape, buffer.dtype) for buffer in plan
    }
    addresses = {name: array.ctypes.data for name, array in binding.host.items()}
    assert all(address % 64 == 0 for address in addresses.values())
    for width, rows in ((1, 1), (9, 9), (72, 1), (9, 9)):
        feed(binding, some_ids(width), 0, rows)
    assert {name: array.ctypes.data for name, array in binding.host.items()} == addresses


def test_logits_are_written_into_the_host_s_buffer_and_no_further_than_the_rows(binding: OrtBinding) -> None:
    binding.host[LOGITS][:] = 7.0
    feed(binding, some_ids(4), 0, 2)
    assert (binding.host[LOGITS][:2] != 7.0).any(axis=1).all()
    assert (binding.host[LOGITS][2:] == 7.0).all()


@pytest.fixture
def made(engine: OrtEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The session's bindings as they are made."""
    bindings: list[Any] = []
    make: Callable[[], Any] = engine.session.io_binding

    def noted() -> Any:
        bindings.append(make())
        return bindings[-1]

    monkeypatch.setattr(engine.session, "io_binding", noted)
    return bindings


def test_a_width_seen_before_is_not_bound_again(made: list[Any], binding: OrtBinding) -> None:
    widths = [(1, 1), (5, 5), (9, 9), (5, 1), (OrtBinding.KEPT_WIDTHS, 1)]
    for width, rows in widths:
        feed(binding, some_ids(width), 0, rows)
    assert len(made) == len(widths)
    for width, rows in widths * 3:
        feed(binding, some_ids(width), 0, rows)
    assert len(made) == len(widths)


def test_odd_widths_of_a_long_prompt_are_not_kept(made: list[Any], binding: OrtBinding) -> None:
    width = OrtBinding.KEPT_WIDTHS + 1
    expected = logits_without_cache(some_ids(width))[-1:]
    for _ in range(2):
        np.testing.assert_allclose(feed(binding, some_ids(width), 0), expected, rtol=1e-5, atol=1e-5)
    assert len(made) == 2


def test_a_head_reads_the_model_s_own_buffers(engine: OrtEngine, head: OrtEngine) -> None:
    """A pass whose drafted ids are the model's own tokens but for the last: what the head says is what was fed."""
    model = engine.open(0)
    shared = {name: model.host[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)}
    judge = head.open(0, shared)
    try:
        assert all(judge.host[name] is array for name, array in shared.items())
        ids = some_ids(6)
        for _ in range(3):
            ids.append(int(np.argmax(logits_without_cache(ids)[-1])))
        own = np.argmax(logits_without_cache(ids), axis=-1)
        ids[-1] = (ids[-1] + 1) % SPEC.vocab_size
        feed(model, ids, 0, 4)
        judge.run(len(ids), 4)
        assert judge.host[NUM_ACCEPTED].tolist() == [2]
        assert judge.host[TOKENS][:3].tolist() == own[5:8].tolist()
    finally:
        judge.close()
        model.close()


def test_a_head_for_one_row_reads_the_first_row_of_the_model_s_buffers(engine: OrtEngine, tmp_path: Path) -> None:
    one_row = replace(SPEC, max_rows=1)
    onnx.save(head_graph(MATCH, one_row, SPEC.vocab_size), tmp_path / "match.onnx")
    model = engine.open(0)
    judge = OrtEngine(tmp_path / "match.onnx", head_contract(MATCH, one_row, SPEC.vocab_size), threads=1).open(
        0, model.host
    )
    try:
        assert judge.host[LOGITS] is model.host[LOGITS]
        assert judge.host[TOKENS].shape == (1,)
        for count in (1, 3, 8):
            ids = some_ids(count)
            feed(model, ids, 0)
            judge.run(count, 1)
            assert judge.host[TOKENS].tolist() == [int(np.argmax(logits_without_cache(ids)[-1]))]
            assert judge.host[NUM_ACCEPTED].tolist() == [0]
        with pytest.raises(ValueError, match="pass of 2 tokens and 2 rows: at most 72 and 1"):
            judge.run(2, 2)
    finally:
        judge.close()
        model.close()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((SPEC.max_rows, SPEC.vocab_size)),
        np.zeros((SPEC.max_rows - 1, SPEC.vocab_size), np.float32),
        np.zeros((SPEC.max_rows, SPEC.vocab_size + 1), np.float32),
        np.zeros((SPEC.max_rows, 2 * SPEC.vocab_size), np.float32)[:, ::2],
        np.zeros((2 * SPEC.max_rows, SPEC.vocab_size), np.float32)[::2],
    ],
    ids=["dtype", "fewer rows", "wider rows", "columns not contiguous", "rows not contiguous"],
)
def test_shared_memory_that_does_not_fit_is_refused_and_leaves_the_slot_free(head: OrtEngine, array: Array) -> None:
    with pytest.raises(ValueError, match=r"shared buffer logits: got .*, expected contiguous float32\[9, 32\]"):
        head.open(5, {LOGITS: array})
    head.open(5).close()


# --- slots and misuse ----------------------------------------------------------------------------------------------


def test_an_open_slot_is_not_opened_again_before_it_is_closed(engine: OrtEngine) -> None:
    binding = engine.open(3)
    with pytest.raises(ValueError, match="slot 3 is open already"):
        engine.open(3)
    binding.close()
    again = engine.open(3)
    binding.close()  # closing twice does not close the slot's next binding
    with pytest.raises(ValueError, match="slot 3 is open already"):
        engine.open(3)
    again.close()


def test_a_reopened_slot_starts_empty(engine: OrtEngine) -> None:
    first = engine.open(3)
    feed(first, some_ids(9), 0)
    first.close()
    second = engine.open(3)
    assert not any(array.any() for array in second.host.values())
    second.close()


@pytest.mark.parametrize("num_runs", [0, 1])
def test_a_closed_binding_does_not_run(engine: OrtEngine, num_runs: int) -> None:
    binding = engine.open(4)
    for _ in range(num_runs):
        feed(binding, [1], 0)
    binding.close()
    with pytest.raises(RuntimeError, match="this binding is closed"):
        binding.run(1, 1)
    assert dict(binding.host) == {}


@pytest.mark.parametrize(("width", "rows"), [(0, 1), (1, 0), (-1, 1), (SPEC.max_width + 1, 1), (20, SPEC.max_rows + 1)])
def test_a_pass_beyond_the_limits_is_refused(binding: OrtBinding, width: int, rows: int) -> None:
    with pytest.raises(ValueError, match=f"pass of {width} tokens and {rows} rows: at most 72 and 9"):
        binding.run(width, rows)


# --- the graph and the contract ------------------------------------------------------------------------------------


def refusal(path: Path, spec: ModelSpec = SPEC) -> str:
    """The message with which the graph is refused: one line that names the file."""
    with pytest.raises(BundleError) as caught:
        OrtEngine(path, model_contract(spec), threads=1)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message


def rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = "tokens_in"
    model.graph.node[0].input[1] = "tokens_in"


def drop_output(model: onnx.ModelProto) -> None:
    del model.graph.output[-1]


def add_output(model: onnx.ModelProto) -> None:
    model.graph.output.append(helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [1, "width", HIDDEN]))


def add_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [1, "width"]))


def retype_input(model: onnx.ModelProto) -> None:
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT32


def freeze_width(model: onnx.ModelProto) -> None:
    for index in (0, 1):
        model.graph.input[index].type.tensor_type.shape.dim[1].dim_value = 7


def freeze_rows(model: onnx.ModelProto) -> None:
    model.graph.input[4].type.tensor_type.shape.dim[0].dim_value = 3


def raise_rank(model: onnx.ModelProto) -> None:
    model.graph.input[2].type.tensor_type.shape.dim.add().dim_value = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename_input, "inputs differ from the contract at input_ids: got None, expected ('int64', (1, 'width'))"),
        (drop_output, "outputs differ from the contract at present_value.0: got None, expected ('float32', "),
        (add_output, "outputs differ from the contract at hidden: got ('float32', (1, 'width', 32)), expected None"),
        (add_input, "inputs differ from the contract at attention_mask: got ('int64', (1, 'width')), expected None"),
        (
            retype_input,
            "inputs differ from the contract at position_ids: got ('int32', (1, 'width')), expected ('int64', ",
        ),
        (freeze_width, "inputs differ from the contract at input_ids: got ('int64', (1, 7)), expected ('int64', "),
        (freeze_rows, "inputs differ from the contract at row_indices: got ('int64', (3,)), expected ('int64', "),
        (raise_rank, "inputs differ from the contract at seqlens_k: got ('int32', (1, 1)), expected ('int32', (1,))"),
    ],
)
def test_a_graph_with_other_inputs_or_outputs_is_refused(
    tmp_path: Path, damage: Callable[[onnx.ModelProto], None], message: str
) -> None:
    model = make_model()
    damage(model)
    onnx.save(model, tmp_path / "model.onnx")
    refused = refusal(tmp_path / "model.onnx")
    assert message in refused
    assert refused.endswith("; export the bundle again")


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (replace(SPEC, vocab_size=33), LOGITS),
        (replace(SPEC, kv_layers=(KVLayer(NUM_KV_HEADS, HEAD_DIM + 8),)), KEY),
        (replace(SPEC, kv_layers=(KVLayer(NUM_KV_HEADS - 1, HEAD_DIM),)), KEY),
    ],
    ids=["vocabulary", "head dim", "KV heads"],
)
def test_a_graph_of_another_geometry_is_refused(graph: Path, spec: ModelSpec, name: str) -> None:
    """Found when it is loaded, not in the first pass."""
    assert f"puts differ from the contract at {name}: got " in refusal(graph, spec)


def test_a_graph_without_a_layer_of_the_contract_is_refused(graph: Path) -> None:
    assert "inputs differ from the contract at past_key.1: got None" in refusal(
        graph, replace(SPEC, kv_layers=SPEC.kv_layers * 2)
    )


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 0.999])
def test_a_file_that_cannot_be_read_is_refused(graph: Path, tmp_path: Path, share: float | None) -> None:
    """A missing, an empty and a truncated file."""
    path, content = tmp_path / "model.onnx", graph.read_bytes()
    if share is not None:
        path.write_bytes(content[: int(share * len(content))])
    assert "cannot load it" in refusal(path)


def test_a_graph_that_onnx_runtime_does_not_know_is_refused(tmp_path: Path) -> None:
    model = make_model()
    model.graph.node[0].op_type = "GatherNothing"
    onnx.save(model, tmp_path / "model.onnx")
    assert "cannot load it" in refusal(tmp_path / "model.onnx")


@pytest.mark.parametrize("vocab_size", [SPEC.vocab_size, SPEC.vocab_size - 3])
@pytest.mark.parametrize("name", HEAD_NAMES)
def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path, name: str, vocab_size: int) -> None:
    """A head is loaded for the vocabularies that it was written for: the model's and the target's."""
    path = tmp_path / "head.onnx"
    onnx.save(head_graph(name, SPEC, vocab_size), path)
    OrtEngine(path, head_contract(name, SPEC, vocab_size), threads=1)
    reads_logits = LOGITS in {tensor.name for tensor in head_contract(name, SPEC, vocab_size).inputs}
    wrong = (replace(SPEC, vocab_size=33), vocab_size) if reads_logits else (SPEC, vocab_size + 1)
    with pytest.raises(
        BundleError, match=r"differ from the contract at (logits|probs|draft_probs|context_counts): got "
    ):
        OrtEngine(path, head_contract(name, *wrong), threads=1)


# --- the match head ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> OrtEngine:
    path = tmp_path_factory.mktemp("heads") / "match.onnx"
    onnx.save(head_graph(MATCH, SPEC, SPEC.vocab_size), path)
    return OrtEngine(path, head_contract(MATCH, SPEC, SPEC.vocab_size), threads=1)


@st.composite
def judgements(draw: st.DrawFn, rows: int) -> tuple[Array, list[int], list[int]]:
    """Logits [R, V] of few different values, the ids of a pass at least as wide, and which of them are the rows.

    Drafted ids are the target's own tokens more often than not, so that every acceptance occurs.
    """
    values = st.sampled_from([-np.inf, -3.0, 0.0, 1.0, 2.0]).map(float)
    logits = draw(st_numpy.arrays(np.float32, (rows, SPEC.vocab_size), elements=values, fill=st.just(-3.0)))
    width = draw(st.integers(rows, 14))
    indices = sorted(draw(st.permutations(range(width)))[:rows])
    ids = draw(st.lists(st.integers(0, SPEC.vocab_size - 1), min_size=width, max_size=width))
    for row in range(rows - 1):
        if draw(st.integers(0, 3)):
            ids[indices[row + 1]] = int(np.argmax(logits[row]))
    return logits, ids, indices


@pytest.mark.parametrize("rows", range(1, 10))
@settings(max_examples=40)
@given(data=st.data())
def test_the_match_head_is_its_oracle(head: OrtEngine, rows: int, data: st.DataObject) -> None:
    logits, ids, indices = data.draw(judgements(rows))
    binding = head.open(0)
    try:
        binding.host[LOGITS][:rows] = logits
        binding.host[INPUT_IDS][0, : len(ids)] = ids
        binding.host[ROW_INDICES][:rows] = indices
        binding.run(len(ids), rows)
        tokens = oracle.greedy(logits)
        accepted = oracle.match(tokens, np.array(ids)[indices][1:])
        assert binding.host[TOKENS][:rows].tolist() == tokens.tolist()
        assert binding.host[NUM_ACCEPTED].tolist() == [accepted]
    finally:
        binding.close()


@pytest.mark.parametrize("rows", range(1, 10))
def test_the_match_head_at_every_acceptance(head: OrtEngine, rows: int) -> None:
    """Tokens 1, 2, .., R are the target's own; the first wrong draft is at each place in turn, right ones follow it."""
    binding = head.open(0)
    binding.host[LOGITS][:rows] = np.eye(SPEC.vocab_size)[1 : rows + 1]
    binding.host[ROW_INDICES][:rows] = np.arange(2, rows + 2)
    for accepted in range(rows):
        ids = [0, 0, *range(rows)]
        if accepted < rows - 1:
            ids[accepted + 3] = 31
        binding.host[INPUT_IDS][0, : len(ids)] = ids
        binding.run(len(ids), rows)
        assert binding.host[TOKENS][:rows].tolist() == list(range(1, rows + 1))
        assert binding.host[NUM_ACCEPTED].tolist() == [accepted]
    binding.close()
