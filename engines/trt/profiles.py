"""Optimization profiles, derived from the contract: the sizes an engine is built for.

Whether an engine has a profile for passes of one token is decided by bytes. With it the builder stores the weights of
all matmuls twice, in another layout for one row, while ``verify`` and ``prefill`` share theirs. Without it a pass of
one token runs in ``verify``, which copies keys and values of the whole cache; ``decode`` copies nothing.
"""

from __future__ import annotations

from specrt.engines.contract import ROWS, STANDARD_DIALECT, WIDTH, Contract, ModelSpec

Profile = dict[str, tuple[int, ...]]  # smallest, preferred and largest value of each symbolic dimension
VERIFY, PREFILL, DECODE, SAMPLE = "verify", "prefill", "decode", "sample"


def profiles_of(contract: Contract, has_decode: bool = False) -> dict[str, Profile]:
    """Profiles by name, in the engine's order.

    A model has ``verify`` (1 to W tokens, W preferred) and ``prefill`` (1 token to a whole chunk), and on request
    ``decode`` (1 token); a sampler has one.
    """
    rows, width = contract.limits[ROWS], contract.limits[WIDTH]
    if not contract.has_cache:
        return {SAMPLE: {WIDTH: (1, min(rows, width), width), ROWS: (1, rows, rows)}}
    narrow = min(rows, width)
    profiles: dict[str, Profile] = {
        VERIFY: {WIDTH: (1, narrow, narrow), ROWS: (1, rows, rows)},
        PREFILL: {WIDTH: (1, width, width), ROWS: (1, 1, rows)},
    }
    return {**profiles, DECODE: {WIDTH: (1, 1, 1), ROWS: (1, 1, 1)}} if has_decode else profiles


# A draft has the profile if that saves this part of the bytes that its passes of one token move.
_LEAST_SAVING = 0.1


def wants_decode(role: str, spec: ModelSpec, bytes_per_pass: int) -> bool:
    """Whether ``target`` or ``draft`` has ``decode`` by default; ``bytes_per_pass`` are those of its weights.

    A draft runs one token at a time: the cache is then read once, instead of read, written and read. Passes of one
    token of a target run only without a draft. In the dialect ``standard-22`` every pass writes the whole cache.
    """
    if role != "draft" or spec.dialect != STANDARD_DIALECT:
        return False
    saved = 2 * spec.kv_bytes
    return saved >= _LEAST_SAVING * (bytes_per_pass + spec.kv_bytes + saved)


def shapes_of(contract: Contract, profile: Profile) -> dict[str, tuple[tuple[int, ...], ...]]:
    """(smallest, preferred, largest) shape of each input that has a symbolic dimension."""
    return {
        tensor.name: tuple(tensor.resolve({dim: sizes[i] for dim, sizes in profile.items()}) for i in range(3))
        for tensor in contract.inputs
        if any(isinstance(dim, str) for dim in tensor.shape)
    }
