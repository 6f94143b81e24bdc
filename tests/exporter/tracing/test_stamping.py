"""A graph made of one traced layer of each kind is the graph of a whole trace, and layers that differ are found."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxscript.optimizer import optimize_ir

from specrt.engines.contract import ONNXRUNTIME_DIALECT, STANDARD_DIALECT, ModelSpec
from specrt.engines.errors import ParityError
from specrt.engines.interface import Array
from specrt.exporter.cutting import only_layers
from specrt.exporter.parity.reference import check_parity, reference_logits
from specrt.exporter.passes import optimize
from specrt.exporter.passes.simplify import simplify
from specrt.exporter.tracing import trace as tracing
from specrt.exporter.tracing.observe import observe
from specrt.exporter.tracing.trace import LayerKinds, trace
from tests.exporter.tracing.architectures import VOCAB_SIZE, WINDOW, tiny_model

WIDTH = 6
IDS = np.random.default_rng(2).integers(3, VOCAB_SIZE, 48)


def spec_of(model: Any, dialect: str = ONNXRUNTIME_DIALECT) -> ModelSpec:
    layers = observe(model.config).kv_layers
    return ModelSpec(VOCAB_SIZE, 100, 100 + WIDTH - 1, 60, WIDTH, "float32", layers, dialect)


def kinds_of(model: Any, dialect: str = ONNXRUNTIME_DIALECT) -> LayerKinds | None:
    spec = spec_of(model, dialect)
    with tracing._prepared(model, spec):
        return tracing.layer_kinds(model, spec)


def gemma3(num_layers: int = 6) -> Any:
    """Five layers with a window and a separate rotation for each layer without."""
    types = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(num_layers)]
    return tiny_model("gemma3", num_hidden_layers=num_layers, layer_types=types)


def late_windows() -> Any:
    settings = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    return tiny_model("qwen2", num_hidden_layers=4, **settings)


def odd_second_layer(change: Callable[[Any], None], num_layers: int = 4) -> Any:
    model = tiny_model("llama", num_hidden_layers=num_layers)
    with torch.no_grad():
        change(model.model.layers[1])
    return model


def wider(layer: Any) -> None:
    layer.mlp.gate_proj, layer.mlp.up_proj = torch.nn.Linear(64, 80, bias=False), torch.nn.Linear(64, 80, bias=False)
    layer.mlp.down_proj = torch.nn.Linear(80, 64, bias=False)


def biased(layer: Any) -> None:
    layer.mlp.down_proj.bias = torch.nn.Parameter(torch.randn(64))


def other_epsilon(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon *= 2


def scaled_in_code(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, args, output: output * 0.5)


@pytest.mark.parametrize("dialect", [ONNXRUNTIME_DIALECT, STANDARD_DIALECT])
@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: tiny_model("llama", num_hidden_layers=5), (0, 0, 0, 0, 0)),
        (lambda: tiny_model("granite", num_hidden_layers=4), (0, 0, 0, 0)),
        (lambda: tiny_model("phi3-longrope", num_hidden_layers=4), (0, 0, 0, 0)),
        (lambda: tiny_model("gpt2", num_hidden_layers=4), (0, 0, 0, 0)),
        (gemma3, (0, 0, 0, 0, 0, 1)),
        (lambda: tiny_model("smollm3", num_hidden_layers=6, no_rope_layer_interval=3), (0, 0, 1, 0, 0, 1)),
        (late_windows, (0, 0, 1, 1)),
        (lambda: odd_second_layer(wider), (0, 1, 0, 0)),
        (lambda: odd_second_layer(biased), (0, 1, 0, 0)),
        (lambda: odd_second_layer(other_epsilon), (0, 1, 0, 0)),
        (lambda: odd_second_layer(scaled_in_code), (0, 1, 0, 0)),
    ],
)
def test_layers_of_one_kind_are_those_that_run_the_same_operators(
    make: Callable[[], Any], kinds: tuple[int, ...], dialect: str
) -> None:
    found = kinds_of(make(), dialect)
    assert found is not None and found.kinds == kinds
    assert found.kept == tuple(sorted({kinds.index(kind) for kind in kinds}))


def test_a_number_that_depends_on_the_layer_s_index_makes_every_layer_its_own_kind() -> None:
    assert kinds_of(tiny_model("gpt2", num_hidden_layers=3, scale_attn_by_inverse_layer_idx=True)) is None


def reads_the_first(model: Any) -> Any:
    """The last layer also reads what the first one makes, past the layers in between."""
    first, last = model.model.layers[0].mlp, model.model.layers[-1].mlp
    stored: list[torch.Tensor] = []
    first.register_forward_hook(lambda module, args, output: stored.__setitem__(slice(None), [output]))
    last.register_forward_hook(lambda module, args, output: output + stored[0])
    return model


def test_layers_that_read_each_other_are_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut out, the layers look right to the record: what shows it is the graph."""
    model = reads_the_first(tiny_model("llama", num_hidden_layers=3))
    found = kinds_of(model)
    assert found is not None and found.kinds == (0, 0, 1)
    whole = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    monkeypatch.setattr(tracing, "trace_whole", lambda model, spec, taps: whole)
    assert trace(model, spec_of(model)) is whole


def test_the_model_is_as_before_after_a_cut() -> None:
    model = gemma3()
    layers, types = model.model.layers, list(model.config.layer_types)
    with only_layers(model, (0, 5)):
        assert len(model.model.layers) == model.config.num_hidden_layers == 2
        assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
        assert model.config.layer_types == ["sliding_attention", "full_attention"]
    assert model.model.layers is layers and model.config.layer_types == types
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(6))


def contents(graph: ir.Model) -> tuple[collections.Counter[Any], collections.Counter[Any]]:
    """What a graph is made of: its nodes with their attributes, and its initializers with their values."""
    nodes = collections.Counter(
        (
            node.domain,
            node.op_type,
            len(node.inputs),
            str(sorted((n, str(a.value)) for n, a in node.attributes.items())),
        )
        for node in graph.graph
    )
    tensors = [value.const_value for value in graph.graph.initializers.values()]
    return nodes, collections.Counter(
        (tuple(tensor.shape.numpy()), np.ascontiguousarray(tensor.numpy()).tobytes()) for tensor in tensors if tensor
    )


def parity(graph: ir.Model, spec: ModelSpec, expected: Array, folder: Path) -> None:
    ir.save(graph, folder / "model.onnx", external_data="model.onnx.data")
    check_parity(folder / "model.onnx", spec, IDS, expected, threads=1)


def two_windows() -> Any:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    return tiny_model("gemma3", num_hidden_layers=3, layer_types=types)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(two_windows, id="gemma3", marks=pytest.mark.slow),
        pytest.param(lambda: odd_second_layer(wider, 3), id="odd layer"),
    ],
)
def test_stamped_is_traced_whole(make: Callable[[], Any], tmp_path: Path) -> None:
    model = make()
    spec = spec_of(model)
    expected = reference_logits(model, IDS)
    with tracing._prepared(model, spec):
        raw = tracing._exported(tracing._ContractModule(model, spec), spec)
    tracing._name_dimensions(raw, spec)
    slow = raw.clone()
    optimize_ir(slow)
    whole, stamped = contents(optimize(simplify(raw), spec)), optimize(trace(model, spec), spec)
    assert contents(optimize(slow, spec)) == whole, "a rewrite rule of optimize_ir is missing"
    assert contents(stamped) == whole
    parity(stamped, spec, expected, tmp_path)
    swap_two_layers(stamped)
    with pytest.raises(ParityError, match="differ from the torch model"):
        parity(stamped, spec, expected, tmp_path)


def swap_two_layers(graph: ir.Model) -> None:
    """The fault that stamping could have: the first weights of two layers in each other's place."""
    weights = [node.inputs[1] for node in graph.graph if node.op_type == "MatMul"]
    one, other = [w for w in weights if w and weights[0] and w.shape == weights[0].shape][:2]
    one.const_value, other.const_value = other.const_value, one.const_value


def test_a_model_whose_layers_are_no_list_is_traced_whole() -> None:
    model = tiny_model("llama")
    model.config.num_hidden_layers = 3  # of two: no list of that length
    spec = spec_of(tiny_model("llama"))
    with tracing._prepared(model, spec):
        assert tracing.layer_kinds(model, spec) is None
