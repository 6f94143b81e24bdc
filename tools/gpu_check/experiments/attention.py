"""Attention by form, context, width and live length: the time of a pass, of each of its kernels, and its logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specrt.engines.errors import SpecrtError
from specrt.engines.trt.library import LIBRARIES
from specrt.tools.gpu_check.experiment import Failed, Notes, Skip
from specrt.tools.gpu_check.experiments.kernels import kernel_ms
from specrt.tools.gpu_check.experiments.logits import logits_error
from specrt.tools.gpu_check.experiments.places import Place, on_tensorrt
from specrt.tools.gpu_check.experiments.timing import pass_ms
from specrt.tools.gpu_check.forms import KIT_FORMS
from specrt.tools.gpu_check.kit import Kit

SHORT = 16  # tokens in a short cache


def check_attention(kit: Kit, notes: Notes) -> None:
    """One layer in each form of the kit, on each library that runs it here: which is the fastest, and does its time
    follow the live length? Raises ``Failed`` for a form whose logits are wrong."""
    times: dict[str, dict[str, dict[str, float]]] = {}
    closed: dict[str, str] = {}
    wrong: list[str] = []
    for form, context, bundle in _bundles(kit):
        for library in LIBRARIES:
            label = f"{library}, {context} slots: {form}"
            try:
                place = on_tensorrt(bundle, library, is_target_alone=True, has_decode_profile=True)
                notes.add(label, found := _measured(place))
            except SpecrtError as error:
                closed[label] = str(error)
                notes.add("not measured", closed)
                continue
            except Failed as error:
                wrong.append(f"{label}: {error}")
                continue
            for case, ms in found["ms"].items():
                times.setdefault(f"{library}, {context} slots", {}).setdefault(case, {})[form] = ms
            notes.add("forms, the fastest first", {where: _ranked(cases) for where, cases in times.items()})
    if wrong:
        raise Failed("; ".join(wrong))
    if not times:
        raise Skip("; ".join(dict.fromkeys(closed.values())))


def _bundles(kit: Kit) -> Iterator[tuple[str, int, Path]]:
    """(form, context, bundle), all forms of the shortest context first."""
    names = [(int(name.rpartition("-")[2]), name.rpartition("-")[0], name) for name in kit.attention]
    order = list(KIT_FORMS)
    for context, form, name in sorted(names, key=lambda item: (item[0], order.index(item[1]))):
        yield KIT_FORMS[form], context, kit.attention[name]


def _measured(place: Place) -> dict[str, Any]:
    entry, engine = place.model()
    most, widest, capacity = entry.spec.max_rows, entry.spec.max_width, entry.spec.max_seq_len
    stored = np.load(place.bundle / entry.reference)
    error = logits_error(engine, entry, stored, [most] * (len(stored["ids"]) // most))
    if not error <= entry.logits_tolerance:
        raise Failed(f"logits are off by {error:.3g} of the largest, expected {entry.logits_tolerance:.3g} at most")
    binding = engine.open()
    starts = (SHORT, capacity // 4, capacity - widest)
    ms = {
        f"width {width} after {start} tokens": pass_ms(binding, width, start, width if width <= most else 1)
        for width in (1, 2, most, widest)
        for start in starts
    }
    shares = {
        f"width {width}": ms[f"width {width} after {starts[-1]} tokens"] / ms[f"width {width} after {SHORT} tokens"]
        for width in (1, 2, most, widest)
    }
    kernels = {
        f"width {width} after {start} tokens": kernel_ms(engine, binding, width, start)
        for width in (1, most)
        for start in (SHORT, starts[-1])
    }
    binding.close()
    return {
        "error of logits": error,
        "ms": ms,
        "time at the full cache over a short one": shares,
        "bytes of KV": entry.spec.kv_bytes,
        "ms by kernel": kernels,
    }


def _ranked(cases: dict[str, dict[str, float]]) -> dict[str, str]:
    """By case, the forms in the order of their times."""
    return {
        case: ", ".join(f"{form} {ms:.4g} ms" for form, ms in sorted(forms.items(), key=lambda item: item[1]))
        for case, forms in cases.items()
    }
