"""The experts of every exported mixture: transformers' experts interface with our own function.

The model's own code routes, and passes the chosen experts of each token with their weights. On the meta device
(``observe``) they are recorded. Under ``torch.onnx.export``, in the dialect ``onnxruntime``, experts that are
``down(silu(gate) * up)`` become one ``com.microsoft::MoE``, which reads only the chosen experts. All other experts,
and those of the dialect ``standard``, are computed for every token and weighted, with 0 where they were not chosen.
The operator's CPU kernel needs fp32. In fp16 the graph casts the weights, and ONNX Runtime folds these casts when it
loads the graph; casts that it inserts itself would run in every pass.

``MoE`` takes router logits and applies its own softmax. It gets one row for each token and chosen expert, with logits
that select only that expert; its outputs are weighted and added in the graph. So any router can be expressed, and the
order of the sum is always the same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.integrations import moe

from specrt.engines.contract import ONNXRUNTIME_DIALECT
from specrt.exporter.tracing.state import ExpertsSite, Tracing, current

IMPLEMENTATION = "specrt"
EXPERTS_PER_TOKEN = "specrt_experts_per_token"  # key of the node's metadata: the operator's own k is 1
_NOT_CHOSEN = -1e4  # as a logit; that of the chosen expert is 0
_SILUS: tuple[Any, ...] = tuple({torch.nn.SiLU, *(type(ACT2FN[name]) for name in ("silu", "swish"))})


def register_experts() -> None:
    """Make ``experts_implementation="specrt"`` known to transformers. Idempotent."""
    moe.ExpertsInterface.register(IMPLEMENTATION, _experts)


def _experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[M, H] tokens, the [M, k] experts of each and their weights -> [M, H]"""
    state = current()
    site = _site(module, state, int(top_k_index.shape[-1]))
    state.experts.append(site)
    if state.inputs is None:
        return torch.zeros_like(hidden_states)
    compute = _sparse if site.is_sparse else _dense
    return compute(module, hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)


def _site(module: Any, state: Tracing, experts_per_token: int) -> ExpertsSite:
    parameters = sum(parameter.numel() for parameter in module.parameters())
    is_sparse = state.dialect == ONNXRUNTIME_DIALECT and _is_swiglu(module)
    return ExpertsSite(_num_experts(module), experts_per_token, parameters, is_sparse)


def _num_experts(module: Any) -> int:
    return int(module.down_proj.shape[0])


def _is_swiglu(module: Any) -> bool:
    """Whether the experts are ``down(silu(gate) * up)`` in the two layouts that transformers names."""
    return (
        module.has_gate
        and not module.has_post_expert_norm
        and type(module)._apply_gate is moe._default_apply_gate
        and module.is_concatenated
        and (isinstance(module.act_fn, _SILUS) or module.act_fn is torch.nn.functional.silu)
    )


def _sparse(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    num_tokens, num_chosen = top_k_index.shape[0], top_k_index.shape[1]
    rows = hidden_states[:, None].expand(-1, num_chosen, -1).reshape(-1, hidden_states.shape[-1]).float()  # [M * k, H]
    none = torch.full((rows.shape[0], _num_experts(module)), _NOT_CHOSEN)
    logits = none.scatter(1, top_k_index.reshape(-1, 1), 0.0)  # [M * k, E]
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    bias_up, bias_down = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    outputs = torch.onnx.ops.symbolic(
        "com.microsoft::MoE",
        [
            rows,
            logits,
            _interleaved(gate_up).float(),  # [E, 2 I, H]
            None if bias_up is None else _interleaved(bias_up[..., None]).reshape(bias_up.shape).float(),
            down.float(),  # [E, H, I]
            None if bias_down is None else bias_down.float(),
        ],
        {
            "k": 1,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "normalize_routing_weights": 1,
        },
        dtype=rows.dtype,
        shape=rows.shape,
        version=1,
        metadata_props={EXPERTS_PER_TOKEN: str(num_chosen)},
    )
    return (outputs.reshape(num_tokens, num_chosen, -1) * top_k_weights[..., None]).sum(1)


def _interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """[E, 2 I, X] with the gates first -> gate 0, up 0, gate 1, ...: the layout of ``MoE``."""
    num_experts, double, width = gate_up.shape
    return gate_up.reshape(num_experts, 2, double // 2, width).transpose(1, 2).reshape(num_experts, double, width)


def _dense(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Every expert on every token. [E, M, 2 I] values are held at once."""
    num_tokens, num_experts = hidden_states.shape[0], _num_experts(module)
    none = torch.zeros(num_tokens, num_experts)
    weights = none.scatter(1, top_k_index, top_k_weights.float()).transpose(0, 1)[..., None]  # [E, M, 1] f32
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _projected(module, name, hidden_states)
    flat = inner.reshape(-1, inner.shape[-1])  # [E * M, 2 I]: a model's own gate expects two dimensions
    flat = module._apply_gate(flat) if module.has_gate else module.act_fn(flat)
    outputs = _projected(module, "down_proj", flat.reshape(num_experts, num_tokens, -1))  # [E, M, H]
    if module.has_post_expert_norm:
        outputs = module.post_expert_norm(outputs)
    # experts that were not chosen may overflow in fp16, and 0 * inf is NaN
    return torch.where(weights != 0, outputs * weights, torch.zeros(())).sum(0)


def _projected(module: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
    """[M, K] or [E, M, K] -> [E, M, N]"""
    weight = getattr(module, name)
    product = torch.matmul(rows, weight if module.is_transposed else weight.transpose(1, 2))
    return product + getattr(module, f"{name}_bias")[:, None] if module.has_bias else product
