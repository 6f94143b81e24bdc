"""A model and a head in numpy that honour the contract: they drive the loop's tests and measure its own cost.

The fake model's next token is a function of the tokens *in its cache*, which it keeps in the key buffer of layer 0: a
wrong position, a missed row or a bad rollback changes its answer, as it would a real model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from specrt.engines.seam import Array, allocate, check_shared
from specrt.engines.spec import (
    INPUT_IDS,
    LOGITS,
    NUM_ACCEPTED,
    POSITION_IDS,
    ROW_INDICES,
    SEQLENS_K,
    TOKENS,
    TOTAL_SEQUENCE_LENGTH,
    Contract,
    KVLayer,
    ModelSpec,
    match_head_contract,
    model_contract,
    past_name,
    plan_buffers,
)

NextToken = Callable[[Sequence[int]], int]


def fake_spec(vocab_size: int = 64, max_seq_len: int = 128, k: int = 8, max_width: int = 16) -> ModelSpec:
    """A small spec: one layer, one KV head of size 1 (fp32 holds token ids below 2**24 exactly)."""
    return ModelSpec(
        vocab_size, max_seq_len, max_seq_len + k, max(max_width, k + 2), k + 1, "float32", (KVLayer(1, 1),)
    )


def match(logits: Array, drafted_row_ids: Array) -> tuple[Array, int]:
    """The ``match`` rule in numpy: (argmax of each row, number of leading rows whose *next* id equals it).

    ``logits`` is [R, V] f32, ``drafted_row_ids`` [R] i64 the id fed at each row. Ties go to the first maximum.
    """
    tokens = np.argmax(logits, axis=-1)  # [R]
    hits = tokens[:-1] == drafted_row_ids[1:]  # [R - 1]
    return tokens, int(np.argmin(np.append(hits, False)))


class _Binding:
    def __init__(self, owner: _Engine, slot: int, shared: Mapping[str, Array]) -> None:
        self._owner, self._slot, self._is_open = owner, slot, True
        buffers: dict[str, Array] = {}
        for buffer in plan_buffers(owner.contract, frozenset(shared)):
            if buffer.owner == "shared":
                check_shared(buffer.name, shared[buffer.name], buffer.shape, buffer.dtype)
            own = buffer.owner == "self"
            buffers[buffer.name] = allocate(buffer.shape, buffer.dtype) if own else shared[buffer.name]
        self.host: Mapping[str, Array] = MappingProxyType(buffers)

    def run(self, width: int, rows: int) -> None:
        if not self._is_open:
            raise RuntimeError("this binding is closed")
        self._owner.compute(self.host, width, rows)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.host = MappingProxyType({})
            self._owner.open_slots.discard(self._slot)


class _Engine:
    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.open_slots: set[int] = set()

    def open(self, slot: int, shared: Mapping[str, Array] | None = None) -> _Binding:
        if slot in self.open_slots:
            raise ValueError(f"slot {slot} is open already")
        binding = _Binding(self, slot, shared or {})
        self.open_slots.add(slot)
        return binding

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        raise NotImplementedError


class FakeEngine(_Engine):
    """A model whose argmax after a prefix is ``next_token(prefix)``."""

    def __init__(self, spec: ModelSpec, next_token: NextToken) -> None:
        super().__init__(model_contract(spec))
        self.next_token = next_token
        self.num_passes = 0

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        """Write the fed ids into the cache at their positions, then one-hot logits of the asked rows.

        Raises ``ValueError`` for a pass that a real model would answer wrongly.
        """
        self.num_passes += 1
        cache = host[past_name("key", 0)].reshape(-1)  # [capacity]
        start = int(host[TOTAL_SEQUENCE_LENGTH][0]) - width
        positions, last = host[POSITION_IDS][0, :width], int(host[SEQLENS_K][0])
        if start < 0 or not np.array_equal(positions, np.arange(start, start + width)) or last != start + width - 1:
            raise ValueError(f"positions {positions} and seqlens_k {last} do not follow {start} cached tokens")
        indices = host[ROW_INDICES][:rows]
        if indices.min() < 0 or indices.max() >= width:
            raise ValueError(f"row indices {indices} are not all in a pass of {width} tokens")
        cache[start : start + width] = host[INPUT_IDS][0, :width]
        logits = host[LOGITS][:rows]  # [R, V]
        logits[:] = 0
        for row, index in enumerate(indices):
            prefix = cache[: start + int(index) + 1].astype(np.int64).tolist()
            logits[row, self.next_token(prefix)] = 1


class FakeHead(_Engine):
    """The ``match`` head in numpy."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(match_head_contract(spec))

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        row_ids = host[INPUT_IDS][0, :width][host[ROW_INDICES][:rows]]  # [R]
        host[TOKENS][:rows], host[NUM_ACCEPTED][0] = match(host[LOGITS][:rows], row_ids)
