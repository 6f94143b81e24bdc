"""The torch model of a target, and what the training reads of it: tapped hidden states, embedding and lm_head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from specrt.engines.errors import UnsupportedModelError
from specrt.exporter.cutting import place_of_layers

_TOLERANCE = 1e-3  # of the largest logit


@dataclass(frozen=True)
class TrainingTarget:
    """A model in evaluation mode. ``taps`` number its hidden states (0: embeddings, i: output of layer i - 1); they
    may be none.

    Raises ``UnsupportedModelError`` if its logits are not lm_head times a hidden state (a bias, a cap, a scale).
    """

    name: str
    model: Any
    tokenizer: Any
    taps: tuple[int, ...]
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        ids = (torch.arange(8) * 37 % self.vocab_size)[None].to(self.device)
        with torch.no_grad(), self.tapped() as rows:
            logits = self.model(input_ids=ids, use_cache=False).logits
            expected = rows.last @ self.lm_head.T
        if not (logits - expected).abs().max() <= _TOLERANCE * logits.abs().max():
            raise UnsupportedModelError(
                f"{self.name}: its logits are not lm_head times a hidden state (a bias, a scale or a cap), "
                "so no draft can be trained for it"
            )

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def lm_head(self) -> torch.Tensor:
        """[V, H]"""
        weight: torch.Tensor = self.model.get_output_embeddings().weight.detach()
        return weight

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]"""
        weight: torch.Tensor = self.model.get_input_embeddings().weight.detach()
        return weight

    @property
    def hidden_size(self) -> int:
        return int(self.lm_head.shape[1])

    @property
    def vocab_size(self) -> int:
        return int(self.lm_head.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @cached_property
    def final_norm(self) -> Any:
        """The module between the last layer and lm_head, which is found by observation.

        Raises ``UnsupportedModelError`` if there is not exactly one.
        """
        layers: Any = getattr(*place_of_layers(self.model))
        passed: list[tuple[Any, torch.Tensor, torch.Tensor]] = []  # (module, what it reads, what it writes)

        def keep(module: Any, args: Any, output: Any) -> None:
            if args and isinstance(output, torch.Tensor):
                passed.append((module, args[0], output))

        before = TappedRows((self.num_layers,))
        handles = [module.register_forward_hook(keep) for module in self.model.modules()]
        handles.append(layers[-1].register_forward_hook(before.keep_output(self.num_layers)))
        with torch.no_grad(), self.tapped() as rows:
            self.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=self.device), use_cache=False)
        for handle in handles:
            handle.remove()
        ends = before.of(self.num_layers).data_ptr(), rows.last.data_ptr()  # lm_head may read a view
        found = [m for m, read, written in passed if (read.data_ptr(), written.data_ptr()) == ends]
        if len(found) != 1:
            raise UnsupportedModelError(
                f"{self.name}: got {len(found)} modules between its last layer and lm_head, expected one norm; "
                "give --writer torch"
            )
        return found[0]

    @contextmanager
    def tapped(self) -> Iterator[TappedRows]:
        """Inside the block, each pass leaves its hidden states in the object."""
        layers: Any = getattr(*place_of_layers(self.model))
        rows, handles = TappedRows(self.taps), []
        for tap in self.taps:
            if tap == 0:
                handles.append(layers[0].register_forward_pre_hook(rows.keep_input(0), with_kwargs=True))
            else:
                handles.append(layers[tap - 1].register_forward_hook(rows.keep_output(tap)))
        head = self.model.get_output_embeddings()
        handles.append(head.register_forward_pre_hook(rows.keep_input(-1), with_kwargs=True))
        try:
            yield rows
        finally:
            for handle in handles:
                handle.remove()


class TappedRows:
    """The hidden states of the last pass. ``taps`` [B, M, 3 H]; ``last`` [B, M, H], which lm_head reads."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._found = order, dict[int, torch.Tensor]()

    @property
    def taps(self) -> torch.Tensor:
        found = [self._found[tap] for tap in self._order]
        return torch.cat(found, dim=-1) if found else self.last[..., :0]

    @property
    def last(self) -> torch.Tensor:
        return self._found[-1]

    def of(self, tap: int) -> torch.Tensor:
        """One hidden state, the tensor itself."""
        return self._found[tap]

    def keep_input(self, place: int) -> Any:
        """A hook for the hidden state that a module reads."""

        def hook(_: Any, args: Any, kwargs: Any) -> None:
            self._found[place] = args[0] if args else next(iter(kwargs.values()))

        return hook

    def keep_output(self, place: int) -> Any:
        """A hook for the hidden state that a layer writes."""

        def hook(_: Any, __: Any, output: Any) -> None:
            self._found[place] = output[0] if isinstance(output, tuple) else output

        return hook
