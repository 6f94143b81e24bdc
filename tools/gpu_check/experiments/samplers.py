"""The samplers on the GPU against the reference in numpy: ties, banned ids, and every output that is defined."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrt.engines.errors import SpecrtError
from specrt.engines.interface import Array
from specrt.engines.samplers import SAMPLER_NAMES
from specrt.tools.compare.cases import TOLERANCES, cases_of
from specrt.tools.compare.feeding import infer
from specrt.tools.gpu_check.experiment import Failed, Notes
from specrt.tools.gpu_check.experiments.argmax import argmax_of
from specrt.tools.gpu_check.experiments.places import Place, on_each
from specrt.tools.gpu_check.kit import Kit

NUM_CASES = 24


def check_samplers(kit: Kit, notes: Notes) -> None:
    """Each sampler on each backend: ids and counts are equal, probabilities within fp32's rounding."""
    on_each(kit, notes, _samplers_of)


def _samplers_of(place: Place) -> dict[str, Any]:
    errors: dict[str, Any] = {}
    wrong: list[str] = []
    for name in SAMPLER_NAMES:
        contract, engine = place.sampler(name)
        binding = engine.open()
        for number, case in enumerate(cases_of(name, contract, NUM_CASES)):
            found = infer(binding, contract, case.feed)
            for output, expected in case.expected.items():
                error = difference(found[output], expected)
                errors[f"{name}: {output}"] = max(error, errors.get(f"{name}: {output}", 0.0))
                if error > TOLERANCES.get(output, 0.0):
                    wrong.append(f"{name}: {output} of case {number} is off by {error:.3g}")
        binding.close()
    if wrong:
        raise Failed(f"{wrong[0]} ({len(wrong)} outputs differ)")
    return {"cases of each": NUM_CASES, "largest difference": errors, "ArgMax of the library": _argmax_of(place)}


def _argmax_of(place: Place) -> dict[str, Any] | str:
    """No sampler needs it: where it cannot run, that is a figure."""
    try:
        return argmax_of(place)
    except SpecrtError as error:
        return str(error)


def difference(found: Array, expected: Array) -> float:
    """The largest |difference|; equal infinities do not differ, and what is no number differs without end."""
    with np.errstate(invalid="ignore"):
        gap = np.where(found == expected, 0.0, np.abs(found.astype(np.float64) - expected))
    return float(np.nan_to_num(gap, nan=np.inf).max())
