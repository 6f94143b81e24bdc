"""EAGLE-3 heads in files: reads the layouts of ``layouts.LAYOUTS``, writes that of ``speculators``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrt.engines.errors import PairError, SourceError, UnsupportedModelError, one_line
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.folders import new_folder
from specrt.exporter.heads.config import HeadConfig, HeadVariant
from specrt.exporter.heads.layouts import LAYOUTS, Layout, architecture_of, foreign_kind, layout_of
from specrt.exporter.heads.module import Head
from specrt.exporter.heads.settings import check_keys, layer_config, variant, vocab_size
from specrt.exporter.heads.tensors import check_tensors, read_offsets, read_tensors, stored_norms
from specrt.exporter.sources.checkpoint import Checkpoint, open_checkpoint
from specrt.exporter.sources.hub_files import commit_of, optional_bytes

_WRITTEN_VERSION = "0.9.0"  # of speculators, whose layout is written


@dataclass(frozen=True)
class LoadedHead:
    """A head as its files state it.

    ``tensors`` has the names of ``module.Head``, in the dtype of the files; ``embed_tokens.weight`` is absent when the
    target's is used, and the norms before ``fc`` may be present though the stated variant has none. ``notes`` are for
    the user. ``layout`` is a name of ``layouts.LAYOUTS``. ``revision`` is the commit of a hub id.
    """

    config: HeadConfig
    tensors: dict[str, torch.Tensor]
    layout: str
    notes: tuple[str, ...] = ()
    trained_theta: float | None = None
    revision: str | None = None

    @property
    def stated(self) -> HeadVariant:
        """The variant that the head's config states."""
        return self.config.variant


def head_from_folder(
    folder: str | Path,
    num_target_layers: int,
    target_hidden_size: int,
    target_vocab_size: int,
    taps: Sequence[int] | None = None,
    revision: str | None = None,
) -> LoadedHead:
    """The head in ``folder`` (or at a hub id), for a target of these sizes. ``taps`` replaces the config's.

    Raises ``SourceError`` for absent, damaged or contradictory files, ``UnsupportedModelError`` for other kinds of
    drafts and what specrt does not read, ``PairError`` for a head of another target.
    """
    location = str(folder)
    if revision is not None and Path(location).exists():
        raise SourceError(f"{location}: --draft-revision {revision} is for hub ids, this is a local path; leave it out")
    config = _read_config(location, revision)
    commit = None if Path(location).exists() else commit_of(location, "config.json", revision)
    checkpoint = open_checkpoint(location, revision=commit or revision)
    tensors, skipped = read_tensors(checkpoint)
    layout = _recognised(config, checkpoint, tensors, location)
    check_keys(config, layout)
    layer, notes = layer_config(config, layout)
    _check_target(config, layout, layer, target_hidden_size, target_vocab_size, "embed_tokens.weight" in tensors)
    stated = variant(config, layout, num_target_layers, stored_norms(tensors), taps)
    head = HeadConfig(
        layer=layer,
        target_hidden_size=target_hidden_size,
        vocab_size=target_vocab_size,
        draft_vocab_size=config.get("draft_vocab_size") or target_vocab_size,
        variant=stated,
    )
    check_tensors(tensors, head)
    tensors["d2t"] = read_offsets(tensors, head.draft_vocab_size, target_vocab_size)
    tensors.pop("t2d", None)
    if skipped:
        notes.append(f"{len(skipped)} tensors of the head are not read, since they are not its own: {skipped[0]} ...")
    return LoadedHead(head, tensors, layout.name, tuple(notes), layout.trained_theta, commit)


def build_head(config: HeadConfig, tensors: Mapping[str, torch.Tensor], target_embedding: torch.Tensor) -> Head:
    """The module in float32. ``target_embedding`` [V, H] is used when ``tensors`` has none.

    Norms before ``fc`` that the variant does not have are left out; any other mismatch is an error.
    """
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    if "embed_tokens.weight" not in state:
        state["embed_tokens.weight"] = target_embedding.detach().float()
    if config.variant.fc_norm == "none":
        state = {name: tensor for name, tensor in state.items() if not name.startswith("fc_norm.")}
    with torch.device("meta"):
        head = Head(config)
    head.rotary = type(head.rotary)(config.layer)  # its frequencies are computed, not loaded
    head.load_state_dict(state, strict=True, assign=True)
    return head.eval().requires_grad_(False)


def write_head(
    folder: Path,
    head: Head,
    target_name: str,
    target_architectures: Sequence[str] = (),
    num_speculative_tokens: int = 3,
    progress: Progress = SILENT,
) -> None:
    """Write ``head`` to ``folder`` in speculators' layout; it appears whole or not at all.

    With its embedding, although it is the target's: without it speculators 0.9.0 reads memory that was never written.
    Raises ``ResourceError``.
    """
    from safetensors.torch import save_file

    tensors = {
        _written_name(name, head.config.variant): t.detach().contiguous() for name, t in head.state_dict().items()
    }
    if head.config.draft_vocab_size == head.config.vocab_size:
        del tensors["d2t"]
    else:
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][torch.arange(head.config.draft_vocab_size) + tensors["d2t"]] = True
    config = _written_config(head.config, target_name, target_architectures, num_speculative_tokens)
    with new_folder(folder, progress) as place:
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _read_config(location: str, revision: str | None) -> dict[str, Any]:
    content = optional_bytes(location, "config.json", revision, must_know=True)
    if content is None:
        raise SourceError(f"{location}: no config.json; give the folder or hub id of an EAGLE-3 head")
    try:
        config = json.loads(content)
    except ValueError as error:
        raise SourceError(f"{location}: config.json is no JSON ({one_line(error)}); download the head again") from error
    if not isinstance(config, dict):
        raise SourceError(f"{location}: config.json is no object; download the head again")
    return config


def _recognised(
    config: Mapping[str, Any], checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], location: str
) -> Layout:
    if kind := foreign_kind(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}):
        raise UnsupportedModelError(f"{location} is {kind}; specrt reads EAGLE-3 heads")
    if "fc.weight" not in tensors:
        raise UnsupportedModelError(
            f"{location} is no EAGLE-3 head: among its {len(checkpoint.names())} tensors is no fc.weight, which fuses "
            "the target's hidden states; a small model is a draft by --draft FOLDER"
        )
    if (layout := layout_of(config)) is None:
        name = config.get("speculators_model_type") or architecture_of(config)
        raise UnsupportedModelError(
            f"{location} is a head of kind {name!r}; specrt reads those of {', '.join(row.name for row in LAYOUTS)}"
        )
    return layout


def _check_target(
    config: Mapping[str, Any], layout: Layout, layer: Any, hidden_size: int, num_ids: int, has_embedding: bool
) -> None:
    """Raise ``PairError`` when the head was made for a target of other sizes."""
    expected = config.get("target_hidden_size") or layer.hidden_size
    if expected != hidden_size:
        raise PairError(
            f"the head reads hidden states of {expected} columns (target_hidden_size), and the target has "
            f"{hidden_size}; take the head's own target"
        )
    if (size := vocab_size(config, layout)) != num_ids:
        raise PairError(
            f"the head is for a vocabulary of {size} ids, and the target has {num_ids}; take its own target"
        )
    if not has_embedding and layer.hidden_size != hidden_size:
        raise PairError(
            f"the head has no embed_tokens.weight, and its {layer.hidden_size} columns are not the target's "
            f"{hidden_size}, so that the target's embedding cannot be used; download the whole head"
        )


def _written_name(name: str, stated: HeadVariant) -> str:
    if name.startswith("fc_norm.0.") and stated.fc_norm == "whole":
        return name.replace("fc_norm.0.", "input_norm.")
    return name.replace("layer.", "layers.0.", 1) if name.startswith("layer.") else name


def _written_config(
    config: HeadConfig, target_name: str, architectures: Sequence[str], num_speculative_tokens: int
) -> dict[str, Any]:
    stated = config.variant
    layer = {key: value for key, value in config.layer.to_diff_dict().items() if value is not None}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _WRITTEN_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": list(architectures)},
        },
        "transformer_layer_config": {**layer, "vocab_size": config.vocab_size, "tie_word_embeddings": False},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(stated.taps),
        "norm_before_residual": stated.norm_before_residual,
        "norm_before_fc": stated.fc_norm == "whole",
        "fc_norm": stated.fc_norm == "each",
        "norm_output": stated.norm_output,
        "dtype": "float32",
    }
