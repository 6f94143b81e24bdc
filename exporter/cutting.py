"""Drafts cut out of a model: some of its layers (``--draft skip:N``), or a head of few rows (``--draft-vocab N``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError
from specrt.engines.seam import Array
from specrt.exporter.reference import mean_kl, whole_logits

_NUM_RANKED = 32  # positions of the reference text that layers are ranked by


def choose_layers(model: Any, num_kept: int, ids: Array) -> tuple[int, ...]:
    """The ``num_kept`` layers without which, one at a time, the model's logits over ``ids`` [N] change most.

    Raises ``UnsupportedModelError`` where the layers are not one list.
    """
    layers = getattr(*place_of_layers(model))
    ids = ids[:_NUM_RANKED]
    whole = whole_logits(model, ids)
    harm = []
    for index in range(len(layers)):
        skipped = layers[index].register_forward_hook(_pass_on, with_kwargs=True)
        try:
            harm.append(mean_kl(whole, whole_logits(model, ids)))
        finally:
            skipped.remove()
    most = sorted(range(len(layers)), key=lambda index: (-harm[index], index))[:num_kept]
    return tuple(sorted(most))


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Take all other layers out of ``model``; those left are numbered anew, in their order."""
    parent, name = place_of_layers(model)
    layers = getattr(parent, name)
    setattr(parent, name, torch.nn.ModuleList([layers[index] for index in kept]))
    _number(getattr(parent, name))
    config = model.config.get_text_config()
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)


@contextmanager
def only_layers(model: Any, kept: Sequence[int]) -> Iterator[None]:
    """Inside the block ``model`` has the ``kept`` layers only, and after it all of them again."""
    parent, name = place_of_layers(model)
    layers, config = getattr(parent, name), model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    keep_layers(model, kept)
    try:
        yield
    finally:
        setattr(parent, name, layers)
        _number(layers)
        if types:
            config.layer_types = types
        config.num_hidden_layers = len(layers)


def _number(layers: Iterable[torch.nn.Module]) -> None:
    """Give every module that knows the index of its layer the index in ``layers``."""
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = number  # type: ignore[assignment]


def _pass_on(layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """What a layer puts out that does nothing: its input."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def place_of_layers(model: Any) -> tuple[Any, str]:
    """The module that has the list of layers, and the list's name there. Raises ``UnsupportedModelError``."""
    wanted = model.config.get_text_config().num_hidden_layers
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == wanted:
                return parent, name
    raise UnsupportedModelError(
        f"--draft skip: {type(model).__name__} does not keep its {wanted} layers in one list; use another draft"
    )


def restrict_head(model: Any, num_ids: int) -> None:
    """Let ``model`` give logits of the ids below ``num_ids`` only; it may still be fed all of them.

    Byte-pair vocabularies are numbered in the order of their merges, so the first ids are the frequent ones.
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    small = torch.nn.Linear(head.in_features, num_ids, bias=bias is not None, dtype=head.weight.dtype)
    small.weight.data = head.weight.data[:num_ids].clone()
    if bias is not None:
        small.bias.data = bias.data[:num_ids].clone()
    model.set_output_embeddings(small)
    model.config.get_text_config().tie_word_embeddings = False
