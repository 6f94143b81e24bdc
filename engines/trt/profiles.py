"""Optimization profiles, derived from the contract: the sizes an engine is built for."""

from __future__ import annotations

from specrt.engines.contract import ROWS, WIDTH, Contract

Profile = dict[str, tuple[int, ...]]  # smallest, preferred and largest value of each symbolic dimension
VERIFY, PREFILL, DECODE, SAMPLE = "verify", "prefill", "decode", "sample"


def profiles_of(contract: Contract, has_decode: bool = False) -> dict[str, Profile]:
    """Profiles by name, in the engine's order.

    A model has ``verify`` (1 to W tokens, W preferred) and ``prefill`` (1 token to a whole chunk), and with
    ``has_decode`` also ``decode`` (1 token; ``specrt.engines.trt.decode``); a sampler has one.
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


def shapes_of(contract: Contract, profile: Profile) -> dict[str, tuple[tuple[int, ...], ...]]:
    """(smallest, preferred, largest) shape of each input that has a symbolic dimension."""
    return {
        tensor.name: tuple(tensor.resolve({dim: sizes[i] for dim, sizes in profile.items()}) for i in range(3))
        for tensor in contract.inputs
        if any(isinstance(dim, str) for dim in tensor.shape)
    }
