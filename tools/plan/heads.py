"""Bytes and operations of an EAGLE-3 head for a target, from the target's config alone, and of its training.

A head has one llama layer of the target's sizes over 2H columns, a matmul that fuses three hidden states, and an
lm_head of its own; it reads the target's embedding. The fusing matmul is in the target's graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt.engines.contract import ITEM_BYTES
from specrt.engines.errors import UnsupportedModelError, UsageError
from specrt.tools.plan.roofline import ModelCost
from specrt.tools.plan.sizes import DTYPES, NODES_PER_LAYER, OTHER_NODES, Shape, bytes_per_weight

KIND = "eagle3"
DEFAULT_IDS = 32_000  # of published heads; those that are trained here have 8,192 at most
_NUM_TAPS = 3
_NUM_SWIGLU = 3  # matmuls of the layer's MLP
_BYTES_OF_TRAINING = 16  # of a parameter: the weight, its gradient and two moments, in fp32
_DEPTH = 3  # steps of training-time testing


@dataclass(frozen=True)
class HeadCost:
    """``model`` is the head as a draft. ``num_parameters`` are trained; ``text_bytes`` on disk for a token of text."""

    model: ModelCost
    num_parameters: int
    text_bytes: int

    @property
    def training_bytes(self) -> int:
        """Memory of the parameters, their gradients and AdamW's moments; the target and activations are not in it."""
        return self.num_parameters * _BYTES_OF_TRAINING

    @property
    def training_flops_per_token(self) -> int:
        """Operations of one token in one pass over the text, forward and backward, for all steps of the chains."""
        return 6 * self.num_parameters * _DEPTH

    def lines(self) -> list[str]:
        """What its training takes."""
        return [
            f"training the head: {self.num_parameters / 1e6:.1f} M parameters, {self.training_bytes / 1e9:.2f} GB with "
            f"gradients and AdamW's moments, {self.training_flops_per_token / 1e9:.2f} GFLOP a token and pass; "
            f"{self.text_bytes * 1e6 / 1e9:.1f} GB on disk for a million tokens of text",
            "the head reads the target's embedding, and its fusing matmul runs in the target's graph",
        ]


def is_head(draft: str) -> bool:
    """Whether ``draft`` names a planned head: ``eagle3``, or ``eagle3:N`` with the number of its ids."""
    return draft.partition(":")[0] == KIND


def head_cost_of(
    draft: str, target: str, shape: Shape, revision: str | None = None, trust_remote_code: bool = False
) -> HeadCost:
    """The cost of a head for ``target``, exported as ``shape``.

    Raises ``UsageError`` for a wrong number of ids, and as ``cost_of`` does.
    """
    from specrt.exporter.sources.adapters import find_adapted_config
    from specrt.exporter.tracing.observe import observe

    config = find_adapted_config(target, revision, trust_remote_code)
    observation, text = observe(config, trust_remote_code), config.get_text_config()
    num_ids = _num_ids(draft, observation.vocab_size)
    size, layer = int(text.hidden_size), observation.kv_layers[0]
    inner = getattr(text, "intermediate_size", None)
    if not isinstance(inner, int):
        raise UnsupportedModelError(f"{target}: its config has no intermediate_size, which a head's layer takes")
    rows = int(text.num_attention_heads) * layer.head_dim
    key_rows = layer.num_kv_heads * layer.head_dim
    attention = 2 * size * (rows + 2 * key_rows) + rows * size
    matmuls, lm_head = attention + _NUM_SWIGLU * size * inner, num_ids * size
    step, fusing = matmuls + lm_head, _NUM_TAPS * size * size
    item_bytes = ITEM_BYTES[DTYPES[shape.dtype]]
    weight_bytes, lm_head_weight_bytes = bytes_per_weight(shape)
    step_bytes = int(matmuls * weight_bytes + lm_head * lm_head_weight_bytes)
    length = min(shape.max_seq_len, observation.max_position_embeddings or shape.max_seq_len)
    kv_bytes_per_token = (2 * key_rows + size) * item_bytes  # the feature of the position too
    model = ModelCost(
        name=f"{Path(target).stem} head of {num_ids} ids",
        max_seq_len=length,
        weights_bytes=step_bytes + fusing * item_bytes,
        bytes_per_pass=step_bytes,
        kv_bytes=kv_bytes_per_token * (length + shape.k),
        kv_bytes_per_token=kv_bytes_per_token,
        scratch_bytes=(shape.k + 1) * observation.vocab_size * ITEM_BYTES["float32"],
        flops_per_token=2 * step,
        num_nodes=NODES_PER_LAYER + OTHER_NODES,
    )
    text_bytes = (_NUM_TAPS + 1) * size * ITEM_BYTES["float16"] + 3 * ITEM_BYTES["float32"]
    return HeadCost(model, step + fusing, text_bytes)


def _num_ids(draft: str, vocab_size: int) -> int:
    number = draft.partition(":")[2]
    if not number:
        return min(DEFAULT_IDS, vocab_size)
    if not (number.isascii() and number.isdigit() and 1 <= int(number) <= vocab_size):
        raise UsageError(f"--draft {draft}: expected eagle3:N, N of the target's {vocab_size} ids")
    return int(number)
