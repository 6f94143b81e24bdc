"""Heads for tests: random or trained here, saved in each trainer's layout with the flags that the test wants."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from specrt.exporter.heads.config import FcNorm, HeadConfig, HeadVariant, default_taps
from specrt.exporter.heads.module import Head
from specrt.exporter.heads.unroll import unroll
from tests.tiny import tiny_llama_config

NUM_LAYERS = 8
SIZE = 64
TAPS = default_taps(NUM_LAYERS)  # (2, 4, 5)
WRITTEN = torch.arange(5, 310, 13)  # the ids that the tiny target writes
LR = 5e-3
LAYOUTS = ("official", "SpecForge", "AngelSlim", "speculators")


def tiny_target(seed: int = 0, **overrides: Any) -> Any:
    """A random causal LM of eight layers that writes few ids, so that a head learns to predict it in seconds."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {"num_hidden_layers": NUM_LAYERS, "hidden_size": SIZE, "initializer_range": 0.1, **overrides}
    target = LlamaForCausalLM(tiny_llama_config(**settings)).eval()
    others = torch.ones(target.config.vocab_size, dtype=torch.bool)
    others[WRITTEN] = False
    target.lm_head.weight.data[others] = 0.0
    return target


class CopyingTarget:
    """Chooses the id of ``LAG`` positions before, and has its embeddings as all hidden states.

    A head finds that position by its rotation alone.
    """

    LAG = 3

    def __init__(self, like: Any) -> None:
        self.config, self._embedding = like.config, like.get_input_embeddings()

    def get_input_embeddings(self) -> torch.nn.Module:
        """The other target's."""
        embedding: torch.nn.Module = self._embedding
        return embedding

    def __call__(self, ids: torch.Tensor, output_hidden_states: bool = True) -> Any:
        earlier = functional.pad(ids, (self.LAG, 0))[:, : ids.shape[1]]
        states = [self._embedding(ids).detach()] * (NUM_LAYERS + 1)
        return SimpleNamespace(logits=functional.one_hot(earlier, self.config.vocab_size), hidden_states=states)


def head_config(
    kind: str = "llama", draft_vocab_size: int = 150, variant: HeadVariant | None = None, rope_theta: float = 5000.0
) -> HeadConfig:
    """A head for ``tiny_target``."""
    from transformers import LlamaConfig, Qwen3Config

    vocab_size = tiny_llama_config().vocab_size
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        vocab_size=vocab_size,
        hidden_size=SIZE,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    return HeadConfig(layer, SIZE, vocab_size, draft_vocab_size, variant or HeadVariant(TAPS))


def random_head(config: HeadConfig, target: Any, seed: int = 0) -> Head:
    """Random weights, norms included; the target's embedding; the ids that it drafts are spread over the vocabulary."""
    torch.manual_seed(seed)
    head = Head(config)
    for name, parameter in head.named_parameters():
        if "norm" in name:
            parameter.data = torch.randn_like(parameter).mul(0.5).exp()
        elif name == "fc.weight":
            parameter.data *= 4.0  # features far from the scale of normalized ones
        elif name.endswith(".bias"):
            parameter.data.normal_()
    head.embed_tokens.weight.data = target.get_input_embeddings().weight.detach().clone()
    others = torch.randperm(config.vocab_size)
    others = others[~torch.isin(others, WRITTEN)][: config.draft_vocab_size - len(WRITTEN)]
    ids = torch.cat((WRITTEN, others)).sort().values
    head.d2t.copy_(ids - torch.arange(config.draft_vocab_size))
    return head.eval().requires_grad_(False)


@dataclass(frozen=True)
class Flags:
    """What config.json says; ``taps`` are indices into transformers' ``hidden_states``, None: no key."""

    taps: tuple[int, ...] | None
    norm_before_residual: bool = False
    fc_norm: FcNorm = "none"
    norm_output: bool = False
    rope_theta: float | None = None

    @classmethod
    def of(cls, variant: HeadVariant, **changes: Any) -> Flags:
        """Those that state ``variant``, with ``changes``."""
        true = cls(variant.taps, variant.norm_before_residual, variant.fc_norm, variant.norm_output)
        return replace(true, **changes)


def save_head(folder: Path, layout: str, head: Head, flags: Flags | None = None, **config: Any) -> Path:
    """Write ``head`` as ``layout``'s trainer does, with ``flags`` (default: the true ones) and more ``config`` keys."""
    folder.mkdir(parents=True)
    flags = flags or Flags.of(head.config.variant)
    settings = {"speculators": _speculators_config}.get(layout, _flat_config)(layout, head.config, flags)
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    tensors = file_tensors(layout, head)
    if layout == "official":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def file_tensors(layout: str, head: Head) -> dict[str, torch.Tensor]:
    """The tensors under the names of ``layout``."""
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    norms = "input_norm." if head.config.variant.fc_norm == "whole" else "fc_norm.0."
    tensors = {
        name.replace("layer.", prefix, 1) if name.startswith("layer.") else name.replace("fc_norm.0.", norms): tensor
        for name, tensor in head.state_dict().items()
    }
    if layout in ("official", "AngelSlim"):
        del tensors["embed_tokens.weight"]
    mask = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    mask[torch.arange(head.config.draft_vocab_size) + head.d2t] = True
    return {name: tensor.clone() for name, tensor in {**tensors, "t2d": mask}.items()}


def _layer(config: HeadConfig, flags: Flags) -> dict[str, Any]:
    layer = config.layer
    return {
        "model_type": layer.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": 2048,
        "rope_theta": flags.rope_theta or layer.rope_parameters["rope_theta"],
        "bos_token_id": 0,
        "torch_dtype": "float32",
    }


def _flat_config(layout: str, config: HeadConfig, flags: Flags) -> dict[str, Any]:
    names = {
        "official": "LlamaForCausalLM",
        "SpecForge": "LlamaForCausalLMEagle3",
        "AngelSlim": "Eagle3LlamaForCausalLM",
    }
    settings = {
        **_layer(config, flags),
        "architectures": [names[layout]],
        "draft_vocab_size": config.draft_vocab_size,
    }
    on = {
        "norm_before_residual": flags.norm_before_residual,
        "fc_norm": flags.fc_norm == "each",
        "norm_before_fc": flags.fc_norm == "whole",
        "norm_output": flags.norm_output,
    }
    settings |= {key: True for key, value in on.items() if value}
    if flags.taps is not None and layout == "SpecForge":
        settings["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in flags.taps]}
    elif flags.taps not in (None, TAPS):
        settings["eagle_aux_hidden_state_layer_ids"] = list(flags.taps or ())
    return settings


def _speculators_config(layout: str, config: HeadConfig, flags: Flags) -> dict[str, Any]:
    layer = _layer(config, flags)
    for key in ("bos_token_id", "torch_dtype"):
        del layer[key]
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": layer.pop("rope_theta")}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "target", "architectures": []}},
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": None if flags.taps is None else list(flags.taps),
        "norm_before_residual": flags.norm_before_residual,
        "norm_before_fc": flags.fc_norm == "whole",
        "fc_norm": flags.fc_norm == "each",
        "norm_output": flags.norm_output,
        "embed_requires_grad": False,
    }


def texts(target: Any, num_texts: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(ids [B, N] of those that the target writes, its choices [B, N], its hidden states [B, N, H])."""
    generator = torch.Generator().manual_seed(seed)
    ids = WRITTEN[torch.randint(len(WRITTEN), (num_texts, length), generator=generator)]
    with torch.no_grad():
        out = target(ids, output_hidden_states=True)
    return ids, out.logits.argmax(-1), list(out.hidden_states)


def train(head: Head, target: Any, num_steps: int, batch_size: int = 16) -> None:
    """Train ``head`` in place on random texts by cross-entropy with the target's choices, three steps of a chain."""
    head.train().requires_grad_(True)
    head.embed_tokens.requires_grad_(False)
    draft_ids = torch.full((head.config.vocab_size,), -100)
    draft_ids[torch.arange(head.config.draft_vocab_size) + head.d2t] = torch.arange(head.config.draft_vocab_size)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=num_steps, pct_start=0.1)
    for step in range(num_steps):
        ids, choices, states = texts(target, batch_size, 24, seed=step)
        features = head.fuse(torch.cat([states[tap] for tap in head.config.variant.taps], -1))
        loss = torch.zeros(())
        for depth, normalized in enumerate(unroll(head, ids, features, 3), 1):
            logits, wanted = head.logits(normalized[:, :-depth]), draft_ids[choices[:, depth:]]
            loss = loss + functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    head.eval().requires_grad_(False)
