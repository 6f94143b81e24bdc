"""Drafts that are part of a model: some layers (``--draft skip:N``), or some rows of the head (``--draft-vocab N``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError
from specrt.engines.interface import Array
from specrt.exporter.parity.reference import mean_kl, whole_logits

LAYER_INDEX = "layer_idx"  # what transformers calls it in the modules of a layer
_NUM_RANKED = 32  # positions of the reference text used to rank layers


def choose_layers(model: Any, num_kept: int, ids: Array) -> tuple[int, ...]:
    """The ``num_kept`` layers whose removal, one at a time, changes the model's logits over ``ids`` [N] most.

    Raises ``UnsupportedModelError`` when the layers are not in one list.
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
    """Remove all layers but ``kept`` from ``model`` and renumber the rest in order."""
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
    """Inside the block ``model`` has only the ``kept`` layers; all are restored after it."""
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
    """Set the layer index of every module that has one to its index in ``layers``."""
    for number, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, LAYER_INDEX):
                setattr(module, LAYER_INDEX, number)


def _pass_on(layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """The output of a layer that does nothing, which is its input."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def place_of_layers(model: Any) -> tuple[Any, str]:
    """The module that holds the list of layers, and the list's attribute name. Raises ``UnsupportedModelError``."""
    wanted = model.config.get_text_config().num_hidden_layers
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == wanted:
                return parent, name
    raise UnsupportedModelError(
        f"--draft skip: {type(model).__name__} does not keep its {wanted} layers in one list; use another draft"
    )


def restrict_head(model: Any, num_ids: int) -> None:
    """Restrict the logits of ``model`` to the ids below ``num_ids``. Its inputs may still be any id.

    Ids of byte-pair vocabularies follow the order of the merges, so low ids are the frequent tokens.
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    small = torch.nn.Linear(head.in_features, num_ids, bias=bias is not None, dtype=head.weight.dtype)
    small.weight.data = head.weight.data[:num_ids].clone()
    if bias is not None:
        small.bias.data = bias.data[:num_ids].clone()
    model.set_output_embeddings(small)
    model.config.get_text_config().tie_word_embeddings = False
