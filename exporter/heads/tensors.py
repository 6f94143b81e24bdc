"""The tensors of a head's files under the names of ``module.Head``, checked one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from specrt.engines.errors import PairError, SourceError, UnsupportedModelError
from specrt.exporter.heads.config import NUM_TAPS, FcNorm, HeadConfig
from specrt.exporter.sources.checkpoint import Checkpoint

# The trainers' names, and those of ``module.Head``.
_RENAMED = (
    (re.compile(r"^(?:midlayer|layers\.0)\."), "layer."),
    (re.compile(r"^input_norm\."), "fc_norm.0."),
)
# Not the head's: the target's own tensors, or computed from the config.
_HARMLESS = re.compile(r"^verifier_(lm_head|norm)\.weight$|(^|\.)rotary_emb\.inv_freq$")


def read_tensors(checkpoint: Checkpoint) -> tuple[dict[str, torch.Tensor], list[str]]:
    """({name in ``module.Head``, or ``t2d``: tensor}, names that are not the head's). Raises ``SourceError``."""
    tensors: dict[str, torch.Tensor] = {}
    skipped = []
    for name in checkpoint.names():
        if _HARMLESS.search(name):
            skipped.append(name)
            continue
        ours = name
        for pattern, replacement in _RENAMED:
            ours = pattern.sub(replacement, ours)
        if ours in tensors:
            raise SourceError(f"two tensors of the head are {ours}, the second is {name}; download the head again")
        tensor = checkpoint.read(name)
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise SourceError(f"{name} of the head has values that are not finite; download the head again")
        tensors[ours] = tensor
    return tensors, skipped


def stored_norms(tensors: Mapping[str, torch.Tensor]) -> FcNorm:
    """The norms before the fusing matmul that the files hold."""
    if "fc_norm.1.weight" in tensors:
        return "each"
    return "whole" if "fc_norm.0.weight" in tensors else "none"


def expected_shapes(config: HeadConfig, norms: FcNorm) -> dict[str, tuple[int, ...]]:
    """{name in ``module.Head``: shape} of what the files of a head must hold; the embedding is optional."""
    layer, size, head_dim, wide = (
        config.layer,
        config.hidden_size,
        config.head_dim,
        NUM_TAPS * config.target_hidden_size,
    )
    rows = {"q": layer.num_attention_heads, "k": layer.num_key_value_heads, "v": layer.num_key_value_heads}
    attention, mlp = "layer.self_attn.", "layer.mlp."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, wide),
        "norm.weight": (size,),
        "lm_head.weight": (config.draft_vocab_size, size),
        "embed_tokens.weight": (config.vocab_size, size),
        **{f"layer.{n}.weight": (size,) for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        **{f"{attention}{n}_proj.weight": (heads * head_dim, 2 * size) for n, heads in rows.items()},
        f"{attention}o_proj.weight": (size, layer.num_attention_heads * head_dim),
        f"{mlp}gate_proj.weight": (layer.intermediate_size, size),
        f"{mlp}up_proj.weight": (layer.intermediate_size, size),
        f"{mlp}down_proj.weight": (size, layer.intermediate_size),
    }
    if getattr(layer, "attention_bias", False):
        shapes |= {f"{attention}{n}_proj.bias": shapes[f"{attention}{n}_proj.weight"][:1] for n in "qkvo"}
    if getattr(layer, "mlp_bias", False):
        shapes |= {f"{mlp}{n}_proj.bias": shapes[f"{mlp}{n}_proj.weight"][:1] for n in ("gate", "up", "down")}
    if layer.model_type == "qwen3":
        shapes |= {f"{attention}{n}_norm.weight": (head_dim,) for n in ("q", "k")}
    columns = {"none": (), "whole": (wide,), "each": (config.target_hidden_size,) * NUM_TAPS}[norms]
    return shapes | {f"fc_norm.{i}.weight": (n,) for i, n in enumerate(columns)}


def check_tensors(tensors: Mapping[str, torch.Tensor], config: HeadConfig) -> None:
    """Compare names, shapes and dtypes with ``config``.

    Raises ``SourceError`` for absent tensors and other shapes, ``UnsupportedModelError`` for tensors nothing reads.
    """
    expected = expected_shapes(config, stored_norms(tensors))
    absent = [name for name in expected if name not in tensors and name != "embed_tokens.weight"]
    unread = sorted(tensors.keys() - expected.keys() - {"d2t", "t2d"})
    if config.variant.fc_norm not in ("none", stored_norms(tensors)):
        absent.append("fc_norm.0.weight")
    if absent:
        raise SourceError(
            f"the head has no tensor {_some(absent)}; download the whole head, or correct its config.json"
        )
    if unread:
        raise UnsupportedModelError(f"nothing reads the head's tensor {_some(unread)}; specrt does not know this kind")
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise SourceError(
                f"{name} of the head is {list(tensor.shape)}, and config.json makes it {list(shape)}: "
                "correct config.json, or download the head again"
            )
        if tensor is not None and tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise UnsupportedModelError(f"{name} of the head is {tensor.dtype}; specrt reads heads in floating point")


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def read_offsets(tensors: Mapping[str, torch.Tensor], draft_vocab_size: int, vocab_size: int) -> torch.Tensor:
    """``d2t`` [draft_vocab_size] i64: logit ``i`` is of the target's id ``i + d2t[i]``; zeros if all ids are drafted.

    Raises ``PairError`` for ids that the target does not have, ``SourceError`` for a mapping that is none.
    """
    if "d2t" not in tensors:
        if draft_vocab_size != vocab_size:
            raise SourceError(
                f"the head has no d2t, and drafts {draft_vocab_size} of the target's {vocab_size} ids; "
                "download the whole head"
            )
        return torch.zeros(draft_vocab_size, dtype=torch.int64)
    offsets = tensors["d2t"]
    if offsets.shape != (draft_vocab_size,) or offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise SourceError(
            f"d2t of the head is {offsets.dtype} {list(offsets.shape)}, expected {draft_vocab_size} integers; "
            "download the head again"
        )
    offsets = offsets.to(torch.int64)
    ids = offsets + torch.arange(draft_vocab_size)
    mask = tensors.get("t2d")
    marked = ids if mask is None else mask.nonzero().flatten()
    if 1 < draft_vocab_size < vocab_size and torch.equal(offsets, marked):  # a single id is its own offset
        raise SourceError("d2t of the head holds target ids; expected offsets: id = i + d2t[i]; correct the file")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise PairError(
            f"d2t of the head maps to the target's ids {int(ids.min())} to {int(ids.max())}, and the target has "
            f"{vocab_size}; take the head's own target"
        )
    if bool((ids.diff() <= 0).any()):
        raise SourceError("d2t of the head does not map to increasing, different target ids; download the head again")
    _check_mask(mask, ids, vocab_size)
    return offsets


def _check_mask(mask: torch.Tensor | None, ids: torch.Tensor, vocab_size: int) -> None:
    """``t2d`` marks exactly the target's ids that ``d2t`` maps to."""
    if mask is None:
        return
    if mask.shape != (vocab_size,):
        raise PairError(f"t2d of the head has shape {list(mask.shape)}, and the target has {vocab_size} ids")
    if not torch.equal(mask.bool().nonzero().flatten(), ids):
        raise SourceError("t2d and d2t of the head name different target ids; download the head again")
