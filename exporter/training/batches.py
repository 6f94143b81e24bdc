"""Conversations packed into rows of a fixed length, which do not attend to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specrt.exporter.training.loss import Wanted
from specrt.exporter.training.store import Entry, Store

_ALIGNMENT = 32
_LENGTH = 512  # of rows, where no conversation is longer: attention costs its square
_MAX_OPEN = 16  # rows that are filled at the same time


@dataclass(frozen=True)
class Batch:
    """R rows of L positions. ``document`` [R, L] numbers the conversations of a row, -1 is padding; ``positions`` count
    within them. ``is_scored`` [R, L]: the target's distribution at the position counts: before each token of an answer,
    and in training of a prompt that the target wrote. The rest as in ``Rows``.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    document: torch.Tensor
    is_scored: torch.Tensor
    taps: torch.Tensor
    last: torch.Tensor
    normalizer: torch.Tensor
    top: torch.Tensor

    def wanted(self, chosen: torch.Tensor, lm_head: torch.Tensor) -> Wanted:
        """The target at the positions ``chosen``, flat indices [N]; ``lm_head`` [D, H] has its rows of drafted ids."""
        last = self.last.flatten(0, 1)[chosen]
        return Wanted(last, self.normalizer.flatten()[chosen], lm_head, self.top.flatten()[chosen])

    def chain_rows(self, offset: int) -> torch.Tensor:
        """Flat indices of the rows whose position ``offset`` later is scored and in the same conversation."""
        length = self.ids.shape[1]
        is_row = torch.zeros_like(self.is_scored)
        same = self.document[:, : length - offset] == self.document[:, offset:]
        is_row[:, : length - offset] = self.is_scored[:, offset:] & same
        return is_row.flatten().nonzero()[:, 0]


@dataclass(frozen=True)
class Packing:
    """Rows of a batch and their length, for about ``tokens`` tokens a batch."""

    num_rows: int
    length: int

    @classmethod
    def of(cls, store: Store, tokens: int) -> Packing:
        longest = max(entry.num_tokens for entry in store.entries)
        length = -(-max(longest, min(_LENGTH, tokens)) // _ALIGNMENT) * _ALIGNMENT
        return cls(max(1, round(tokens / length)), length)

    def rows(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Conversations for each row: each goes into the first open row with room for it."""
        full: list[list[Entry]] = []
        open_rows: list[tuple[int, list[Entry]]] = []
        for entry in entries:
            place = next((n for n, (used, _) in enumerate(open_rows) if used + entry.num_tokens <= self.length), None)
            if place is None:
                if len(open_rows) == _MAX_OPEN:
                    fullest = max(range(_MAX_OPEN), key=lambda n: open_rows[n][0])
                    full.append(open_rows.pop(fullest)[1])
                open_rows.append((entry.num_tokens, [entry]))
            else:
                used, row = open_rows[place]
                row.append(entry)
                open_rows[place] = used + entry.num_tokens, row
        return full + [row for _, row in open_rows]


class Batches:
    """The batches of a store's training part, epoch by epoch, and those of its held-out part."""

    def __init__(self, store: Store, packing: Packing, seed: int, device: torch.device) -> None:
        self._store, self._packing, self._seed, self._device = store, packing, seed, device
        self._train = list(store.chosen(held_out=False))
        self._epochs: dict[int, list[list[list[Entry]]]] = {}

    @property
    def num_per_epoch(self) -> int:
        """Batches of the first epoch; later ones may differ by a few."""
        return len(self._of_epoch(0))

    def batch(self, epoch: int, index: int) -> Batch | None:
        """Batch ``index`` of an epoch, or None after its last. The order depends on the seed and the epoch alone."""
        groups = self._of_epoch(epoch)
        return self._load(groups[index]) if index < len(groups) else None

    def held_out(self, max_tokens: int) -> Iterator[Batch]:
        """The held-out conversations up to ``max_tokens``."""
        chosen, num_tokens = [], 0
        for entry in self._store.chosen(held_out=True):
            chosen.append(entry)
            num_tokens += entry.num_tokens
            if num_tokens >= max_tokens:
                break
        for group in self._grouped(self._packing.rows(chosen)):
            yield self._load(group)

    def _of_epoch(self, epoch: int) -> list[list[list[Entry]]]:
        if epoch not in self._epochs:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._train))
            self._epochs = {epoch: self._grouped(self._packing.rows([self._train[n] for n in order]))}
        return self._epochs[epoch]

    def _grouped(self, rows: list[list[Entry]]) -> list[list[list[Entry]]]:
        size = self._packing.num_rows
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def _load(self, group: list[list[Entry]]) -> Batch:
        shape = (len(group), self._packing.length)
        hidden = self._store.hidden_size
        flat = {
            "ids": np.zeros(shape, np.int64),
            "positions": np.zeros(shape, np.int64),
            "document": np.full(shape, -1, np.int64),
            "is_scored": np.zeros(shape, np.bool_),
            "taps": np.zeros((*shape, self._store.num_taps * hidden), np.float32),
            "last": np.zeros((*shape, hidden), np.float32),
            "normalizer": np.zeros(shape, np.float32),
            "top": np.zeros(shape, np.int64),
        }
        for row, entries in enumerate(group):
            start = 0
            for document, entry in enumerate(entries):
                rows, part = self._store.rows(entry), slice(start, start + entry.num_tokens)
                for name in ("ids", "taps", "last", "normalizer", "top"):
                    flat[name][row, part] = getattr(rows, name)
                flat["positions"][row, part] = np.arange(entry.num_tokens)
                flat["document"][row, part] = document
                first = entry.first_scored if entry.is_held_out else entry.first_written
                flat["is_scored"][row, start + first - 1 : part.stop] = True
                start = part.stop
        return Batch(**{name: torch.from_numpy(values).to(self._device) for name, values in flat.items()})


def packed_mask(document: torch.Tensor) -> torch.Tensor:
    """Additive causal mask [R, 1, L, L] f32 within each conversation; ``document`` [R, L] numbers them, -1 is padding.

    Every position sees itself, so that rows of padding are finite.
    """
    length = document.shape[1]
    same = document[:, :, None] == document[:, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    return torch.zeros(seen.shape, device=document.device).masked_fill_(~seen, float("-inf"))[:, None]
