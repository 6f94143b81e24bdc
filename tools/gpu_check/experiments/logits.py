"""The tiny pair's logits: against the exporter's reference, and of one width against another to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specrt.engines.contract import LOGITS, past_name
from specrt.engines.interface import Array, Binding, Engine, write_pass
from specrt.engines.manifest import ModelEntry
from specrt.tools.gpu_check.experiment import Failed, Notes
from specrt.tools.gpu_check.experiments.places import Place, on_each
from specrt.tools.gpu_check.kit import Kit

PREFIX = 5  # tokens in the cache before passes of different widths are compared


def check_logits(kit: Kit, notes: Notes) -> None:
    """Passes of each width on a growing cache, and a prompt in chunks, give the logits of the torch model on a CPU."""
    on_each(kit, notes, _logits_of)


def check_widths(kit: Kit, notes: Notes) -> None:
    """A row has the same bits in passes of two rows or more, with CUDA graphs and without."""
    on_each(kit, notes, _widths_of)


def feed(binding: Binding, ids: Array, widths: Sequence[int], start: int = 0) -> Array:
    """Logits [N, V] of all tokens, fed from position ``start`` on in passes of these widths."""
    rows, begin = [], 0
    for width in widths:
        write_pass(binding.host, ids[begin : begin + width], start + begin, width)
        binding.upload()
        binding.run(width, width)
        rows.append(binding.read(LOGITS)[0][:width].copy())
        begin += width
    return np.concatenate(rows)


def _logits_of(place: Place) -> dict[str, Any]:
    entry, engine = place.model()
    stored = np.load(place.bundle / entry.reference)
    ids, expected = stored["ids"], stored["logits"]
    most = entry.spec.max_rows
    ways = {f"width {width}": [width] * (len(ids) // width) for width in range(1, most + 1)}
    ways["all widths in turn"] = [
        1 + i % most for i in range(len(ids)) if sum(1 + j % most for j in range(i + 1)) <= len(ids)
    ]
    errors = {name: logits_error(engine, entry, stored, widths) for name, widths in ways.items()}
    errors["in chunks"] = _in_chunks(engine.open(), entry, ids, expected[-1])
    worst = max(errors.values())
    if not worst <= entry.logits_tolerance:
        raise Failed(f"logits are off by {worst:.3g} of the largest, expected {entry.logits_tolerance:.3g} at most")
    return {"error over the largest logit": errors, "allowed": entry.logits_tolerance}


def logits_error(engine: Engine, entry: ModelEntry, stored: Any, widths: Sequence[int]) -> float:
    """The largest error over the largest logit in passes of ``widths``; ``stored`` is the exporter's reference.

    Raises ``Failed`` unless the passes wrote their slots of the cache, and no other.
    """
    binding = engine.open()
    found = feed(binding, stored["ids"], widths)
    kept = stored["positions"] < len(found)
    _check_cache(binding, entry, len(found))
    binding.close()
    return _error(found[stored["positions"][kept]], stored["logits"][kept])


def _error(found: Array, expected: Array) -> float:
    return float(np.nan_to_num(np.abs(found - expected).max() / np.abs(expected).max(), nan=np.inf))


def _in_chunks(binding: Binding, entry: ModelEntry, ids: Array, expected: Array) -> float:
    """The last row's error after a prompt in passes of uneven widths, each with one row."""
    start = 0
    while start < len(ids):
        width = min(entry.spec.max_width, 13, len(ids) - start)
        write_pass(binding.host, ids[start : start + width], start, 1)
        binding.upload()
        binding.run(width, 1)
        start += width
    found = binding.read(LOGITS)[0][0].copy()
    binding.close()
    return _error(found, expected)


def _check_cache(binding: Binding, entry: ModelEntry, length: int) -> None:
    """The cache was written in place: every slot that was fed, and none beyond."""
    for layer in range(len(entry.spec.kv_layers)):
        for part in ("key", "value"):
            (slots,) = binding.read(past_name(part, layer))
            is_written = np.abs(slots[0].astype(np.float32)).max(axis=(0, 2)) > 0  # [capacity]
            if not is_written[:length].all() or is_written[length:].any():
                raise Failed(
                    f"layer {layer}: {int(is_written.sum())} slots of its {part} cache are written, expected the "
                    f"first {length}"
                )


def _widths_of(place: Place) -> dict[str, Any]:
    entry, engine = place.model()
    ids = np.load(place.bundle / entry.reference)["ids"]
    most = entry.spec.max_rows
    found = {}
    for uses_graphs in (True, False):
        if hasattr(place.backend, "uses_graphs"):
            place.backend.uses_graphs = uses_graphs
        found[uses_graphs] = {width: _rows(engine.open(), ids, width, most) for width in range(1, most + 1)}
    widest = found[True][most]
    differing = {w: int((rows != widest).any(axis=-1).sum()) for w, rows in found[True].items() if 1 < w < most}
    with_graphs = [w for w, rows in found[True].items() if not np.array_equal(rows, found[False][w])]
    figures = {
        "rows compared": most,
        f"rows of each width that differ from width {most}": differing,
        "rows of width 1 that differ": int((found[True][1] != widest).any(axis=-1).sum()),
        "largest difference of width 1": float(np.abs(found[True][1] - widest).max()),
        "widths that differ with CUDA graphs": with_graphs,
    }
    if any(differing.values()) or with_graphs:
        raise Failed(f"rows differ in their bits: {figures}")
    return figures


def _rows(binding: Binding, ids: Array, width: int, num: int) -> Array:
    """Logits of ``num`` rows after a prefix, each from a pass of ``width`` tokens, run often enough for a capture."""
    feed(binding, ids[:PREFIX], [PREFIX] if num >= PREFIX else [1] * PREFIX)
    rows: list[Array] = []
    for _ in range(4):
        rows = []
        for start in range(0, num, width):
            begin = min(start, num - width)
            passed = feed(binding, ids[PREFIX + begin : PREFIX + begin + width], [width], PREFIX + begin)
            rows.extend(passed[start - begin :])
    binding.close()
    return np.stack(rows)
