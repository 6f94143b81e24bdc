"""Mixtures of experts: what one MoE node expresses, what is computed densely, ties, packing, bytes, refusals.

That graphs answer as their models do is shown by the contract tests, whose rows hold mixtures too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specrt.engines.contract import ONNXRUNTIME_DIALECT, STANDARD_DIALECT
from specrt.engines.errors import UnsupportedModelError, UsageError
from specrt.exporter.parity.precision import cast_weights
from specrt.exporter.passes import optimize
from specrt.exporter.passes.graph import bytes_per_pass, experts_of, routers
from specrt.exporter.planning import check_experts
from specrt.exporter.tracing.observe import observe
from specrt.exporter.tracing.trace import trace
from tests.exporter.tracing.architectures import tiny_config, tiny_model
from tests.exporter.tracing.tiny_experts import IDS, Mixture, W, node_of, passes_of, replace_stored, spec_of, stored

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def mixture() -> Mixture:
    """Weights of experts that add up to less than 1."""
    return Mixture("qwen3_moe")


def test_another_router_or_another_order_of_experts_is_detected(mixture: Mixture, tmp_path: Path) -> None:
    """The negative controls of the contract test: what it must not let pass."""
    assert mixture.error(mixture.graph, tmp_path) <= TOLERANCE
    experts = node_of(mixture.graph, "MoE")
    down = stored(experts.inputs[4])
    replace_stored(experts.inputs[4], np.roll(down, 1, axis=0))
    assert mixture.error(mixture.graph, tmp_path) > 100 * TOLERANCE
    replace_stored(experts.inputs[4], down)
    assert mixture.error(mixture.graph, tmp_path) <= TOLERANCE
    normalized = tiny_model("qwen3_moe", norm_topk_prob=True)
    with torch.no_grad():
        other = normalized(input_ids=torch.from_numpy(IDS)[None], use_cache=False).logits[0].numpy()
    assert np.abs(other - mixture.expected).max() > 100 * TOLERANCE * np.abs(mixture.expected).max()


def test_passes_of_two_rows_and_more_agree_to_the_last_bit(tmp_path: Path) -> None:
    """Reproducible texts rest on it. An expert may have one row only, and kernels for one row add in another order."""
    mixture = Mixture("qwen3_moe", mlp_only_layers=[])
    passes = passes_of(mixture.graph, mixture.spec, tmp_path)
    pairs, triples, wide, single = (passes.logits(0, [width] * (2 * W // width)) for width in (2, 3, W, 1))
    assert np.array_equal(pairs, triples) and np.array_equal(pairs, wide)
    assert not np.array_equal(pairs, single)


def test_ties_are_broken_the_same_way_in_passes_of_all_widths(tmp_path: Path) -> None:
    """A router with equal scores for all experts: which are taken is not defined, but must not depend on the rows."""
    model = tiny_model("mixtral", num_hidden_layers=1)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.zero_()
    spec = spec_of(model)
    passes = passes_of(optimize(trace(model, spec), spec), spec, tmp_path)
    one, single, pairs = (passes.logits(0, widths) for widths in ([W], [1] * W, [2] * (W // 2)))
    scale = np.abs(one).max()
    assert np.abs(one - single).max() <= TOLERANCE * scale
    assert np.abs(one[: len(pairs)] - pairs).max() <= TOLERANCE * scale


@pytest.mark.parametrize("dialect", [ONNXRUNTIME_DIALECT, pytest.param(STANDARD_DIALECT, marks=pytest.mark.slow)])
def test_experts_that_no_operator_expresses_are_computed_densely(dialect: str, tmp_path: Path) -> None:
    mixture = Mixture("qwen3_moe", dialect, hidden_act="gelu", num_hidden_layers=1, mlp_only_layers=[])
    assert not any(node.op_type == "MoE" for node in mixture.graph.graph)
    assert mixture.error(mixture.graph, tmp_path) <= TOLERANCE
    assert experts_of(mixture.graph) is None
    assert [site.is_sparse for site in observe(mixture.model.config).experts] == [False]


def test_in_fp16(tmp_path: Path) -> None:
    """ONNX Runtime's CPU kernel is for fp32, and it widens what the node reads."""
    model = tiny_model("mixtral", num_hidden_layers=1)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(IDS)[None], use_cache=False).logits[0].numpy()
    cast_weights(model, torch.float16)
    spec = spec_of(model, dtype="float16")
    got = passes_of(optimize(trace(model, spec), spec), spec, tmp_path).logits(0, [W, W])
    assert np.abs(got - expected[: len(got)]).max() <= 0.03 * np.abs(expected).max()


def test_an_expert_that_is_not_chosen_may_overflow(tmp_path: Path) -> None:
    """0 times infinity is no number; in fp16 an expert overflows on tokens that are not its own."""
    model = tiny_model("mixtral", num_hidden_layers=1)
    router, experts = model.model.layers[0].mlp.gate, model.model.layers[0].mlp.experts
    with torch.no_grad():
        router.weight.zero_()  # ties: the first two experts are taken
        experts.down_proj[-1] = 1e38
        experts.gate_up_proj[-1] *= 100
    spec = spec_of(model, STANDARD_DIALECT)
    graph = optimize(trace(model, spec), spec)
    assert np.isfinite(passes_of(graph, spec, tmp_path).logits(0, [W])).all()


def test_routers_are_separate_and_a_pass_of_one_token_reads_only_its_experts() -> None:
    """qwen2_moe: the shared expert and its gate read what the router reads, and would be packed with it."""
    mixture = Mixture("qwen2_moe")
    assert len(routers(mixture.graph)) == 2
    for router in routers(mixture.graph):
        assert stored(router.inputs[1]).shape == (64, 8)
    experts = experts_of(mixture.graph)
    assert experts is not None
    assert (experts.num_layers, experts.num_experts, experts.experts_per_token) == (2, 8, 3)
    assert experts.bytes_per_expert == 3 * 64 * 24 * 4
    values = mixture.graph.graph.initializers.values()
    all_bytes = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    table_bytes = mixture.spec.vocab_size * 64 * 4
    unread = 2 * 5 * experts.bytes_per_expert
    assert 0 <= all_bytes - table_bytes - unread - bytes_per_pass(mixture.graph) < 40_000  # tables of the rotation


def test_a_mask_that_no_layer_uses_is_no_reason_to_refuse() -> None:
    config = tiny_config("qwen2_moe")
    assert config.sliding_window == 0
    assert [site.window for site in observe(config).sites] == [None, None]
    config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="hint: 0"):
        observe(config)


def test_experts_that_would_stay_unquantized_are_refused() -> None:
    sparse, dense = (observe(tiny_config("qwen3_moe", hidden_act=name)) for name in ("silu", "gelu"))
    check_experts("m", sparse, ONNXRUNTIME_DIALECT, "int4")
    check_experts("m", dense, ONNXRUNTIME_DIALECT, "none")
    check_experts("m", observe(tiny_config("llama")), STANDARD_DIALECT, "int4")
    with pytest.raises(UsageError, match=r"--quantize int4: m is a mixture .* experts that are not down.* leave"):
        check_experts("m", dense, ONNXRUNTIME_DIALECT, "int4")
    with pytest.raises(UsageError, match=r"--quantize int8: m is a mixture .* experts for TensorRT are stored"):
        check_experts("m", sparse, STANDARD_DIALECT, "int8")
