"""The I/O contract: the inputs and outputs of every graph of a bundle, defined once.

Tensor names, dtypes, symbolic shapes and the memory that an output shares with an input are defined here. The
exporter's dummy inputs and ONNX names, the backends' bindings, buffer sizes and ``specrt inspect`` are derived from it.

A pass over a model feeds ``width`` new tokens at positions ``start .. start + width - 1`` and returns the logits of
``rows`` of them. ``capacity`` is the number of KV slots. The batch is 1 everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

WIDTH, ROWS, CAPACITY, FEATURE_SLOTS = "width", "rows", "capacity", "feature_slots"
Dim = int | str

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
SEQLENS_K = "seqlens_k"
TOTAL_SEQUENCE_LENGTH = "total_sequence_length"
ROW_INDICES = "row_indices"
LOGITS = "logits"
TOKENS = "tokens"
NUM_ACCEPTED = "num_accepted"
FEATURES = "features"  # of a target with a head: what the head reads of each fed position
FEATURE_CACHE = "feature_cache"  # of a head: features in any order (specrt.runtime.drafting.head)
FEATURE_ROWS = "feature_rows"  # of a head: the row of the cache that each fed pair reads
HIDDEN = "hidden"  # of a head: what its next step reads in place of a feature
UNDRAFTED = -1e30  # a head's logit of ids that it does not draft; with -inf, bans of all others would leave only NaN

# How a graph writes and reads its KV cache, by backend.
ONNXRUNTIME_DIALECT, STANDARD_DIALECT = "onnxruntime", "standard"
# For TensorRT before 10.15, which has no KV cache update (specrt.engines.dialects): operators of opset 22 and before.
STANDARD_22_DIALECT = "standard-22"
STANDARD_DIALECTS = (STANDARD_DIALECT, STANDARD_22_DIALECT)
DIALECTS = {
    "onnxruntime": ONNXRUNTIME_DIALECT,
    "tensorrt-rtx": STANDARD_DIALECT,
    "tensorrt": STANDARD_DIALECT,
}

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


def past_name(part: str, layer: int) -> str:
    """Name of a KV input; ``part`` is ``key`` or ``value``."""
    return f"past_{part}.{layer}"


def present_name(part: str, layer: int) -> str:
    """Name of the KV output that shares its memory with ``past_name(part, layer)``."""
    return f"present_{part}.{layer}"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph. ``alias`` names the input whose memory an output shares."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    alias: str | None = None

    def resolve(self, dims: dict[str, int]) -> tuple[int, ...]:
        """The concrete shape for ``dims``, which has a value for each symbolic dimension."""
        return tuple(dims[d] if isinstance(d, str) else d for d in self.shape)


@dataclass(frozen=True)
class KVLayer:
    """KV geometry of one layer: a key and a value buffer of [1, num_kv_heads, capacity, head_dim] each."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """The parameters from which a model's contract is derived.

    ``max_seq_len`` bounds the committed tokens; ``capacity = max_seq_len + K`` so that a full-width round always fits.
    ``max_width`` is the widest pass (the prefill chunk), ``max_rows`` the maximum number of logits rows of a pass.
    ``dialect`` is one of ``DIALECTS``' values. ``vocab_size`` is the number of logits; ``num_input_ids`` is the number
    of input ids, if that is larger.

    ``feature_size`` H is set for a target that writes features for an EAGLE-3 head, and for the head, which
    ``reads_features``. A head's pair ``i`` is the feature of position ``i`` with the id at position ``i + 1``; its
    positions and KV are numbered by pairs. Its logits are over the target's ids, ``UNDRAFTED`` for ids that it does not
    draft.
    """

    vocab_size: int
    max_seq_len: int
    capacity: int
    max_width: int
    max_rows: int
    dtype: str
    kv_layers: tuple[KVLayer, ...]
    dialect: str = ONNXRUNTIME_DIALECT
    num_input_ids: int | None = None
    feature_size: int | None = None
    reads_features: bool = False

    def knows(self, token_id: int) -> bool:
        """Whether this id is a valid input."""
        return token_id < (self.num_input_ids or self.vocab_size)

    @property
    def limits(self) -> dict[str, int]:
        """The largest value of each symbolic dimension."""
        slots = {FEATURE_SLOTS: self.feature_slots} if self.reads_features else {}
        return {WIDTH: self.max_width, ROWS: self.max_rows, CAPACITY: self.capacity, **slots}

    @property
    def feature_slots(self) -> int:
        """Rows of a head's feature cache: those of a pass of the target, one for each position, and the head's own."""
        return self.max_width + self.capacity + 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV buffers of one sequence."""
        per_slot = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.kv_layers)
        copies = 2 if self.dialect == STANDARD_22_DIALECT else 1
        return copies * per_slot * self.capacity * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Contract:
    """Inputs and outputs of one graph, in the graph's order, and the limits of its symbolic dimensions.

    ``swaps``: outputs and inputs by name whose buffers change places after each pass, so that the next one reads what
    this one wrote.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    limits: dict[str, int]
    swaps: tuple[tuple[str, str], ...] = ()

    @property
    def has_cache(self) -> bool:
        """Whether it is a model's: a sampler keeps nothing from pass to pass."""
        return bool(self.swaps) or any(tensor.alias for tensor in self.outputs)


def model_contract(spec: ModelSpec) -> Contract:
    """The contract of a model's graph.

    Dialect ``onnxruntime``: ``seqlens_k`` holds the index of the last fed position (tokens in the cache after the pass,
    minus one), as ``com.microsoft::GroupQueryAttention`` defines it; ``total_sequence_length`` is the number of tokens
    in the cache after the pass. Dialect ``standard``: the positions determine where to write and what to attend to, and
    the capacity is a constant, as TensorRT requires. Dialect ``standard-22``: the same, but a pass writes the whole
    cache to second buffers, which are swapped with the first ones.
    """
    is_standard = spec.dialect in STANDARD_DIALECTS
    has_second = spec.dialect == STANDARD_22_DIALECT
    swaps = []
    lengths = [TensorSpec(SEQLENS_K, "int32", (1,)), TensorSpec(TOTAL_SEQUENCE_LENGTH, "int32", (1,))]
    inputs = [
        TensorSpec(INPUT_IDS, "int64", (1, WIDTH)),
        TensorSpec(POSITION_IDS, "int64", (1, WIDTH)),
        *([] if is_standard else lengths),
        TensorSpec(ROW_INDICES, "int64", (ROWS,)),
    ]
    outputs = [TensorSpec(LOGITS, "float32", (ROWS, spec.vocab_size))]
    if spec.feature_size is not None and spec.reads_features:
        slots: Dim = spec.feature_slots if is_standard else FEATURE_SLOTS
        inputs.append(TensorSpec(FEATURE_ROWS, "int64", (WIDTH,)))
        inputs.append(TensorSpec(FEATURE_CACHE, spec.dtype, (slots, spec.feature_size)))
        outputs.append(TensorSpec(HIDDEN, spec.dtype, (ROWS, spec.feature_size)))
    elif spec.feature_size is not None:
        outputs.append(TensorSpec(FEATURES, spec.dtype, (WIDTH, spec.feature_size)))
    for index, layer in enumerate(spec.kv_layers):
        capacity: Dim = spec.capacity if is_standard else CAPACITY
        shape: tuple[Dim, ...] = (1, layer.num_kv_heads, capacity, layer.head_dim)
        for part in ("key", "value"):
            past = TensorSpec(past_name(part, index), spec.dtype, shape)
            inputs.append(past)
            alias = None if has_second else past.name
            outputs.append(TensorSpec(present_name(part, index), spec.dtype, shape, alias))
            swaps += [(outputs[-1].name, past.name)] if has_second else []
    return Contract(tuple(inputs), tuple(outputs), spec.limits, tuple(swaps))


@dataclass(frozen=True)
class Buffer:
    """One allocation. ``owner`` is ``self`` when the binding allocates it, else ``shared`` (another binding's)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    owner: str


def plan_buffers(contract: Contract, shared: frozenset[str] = frozenset()) -> tuple[Buffer, ...]:
    """The buffers needed to bind a graph, each at its largest shape. Aliased outputs need no buffer."""
    plan = []
    for tensor in (*contract.inputs, *contract.outputs):
        if tensor.alias is None:
            shape = tensor.resolve(contract.limits)
            owner = "shared" if tensor.name in shared else "self"
            plan.append(Buffer(tensor.name, tensor.dtype, shape, prod(shape) * ITEM_BYTES[tensor.dtype], owner))
    return tuple(plan)
