"""Two runners through Polygraphy's ``Comparator``, with a limit for each output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from polygraphy.comparator import Comparator, SimpleCompareFunc
from polygraphy.logger import G_LOGGER

from specrt.engines.interface import Engine
from specrt.tools.compare.compare import ON_CPU, OutputResult
from specrt.tools.compare.graphs import Graph
from specrt.tools.compare.runners import BindingRunner, FunctionRunner

ON_GPU = "the GPU"


def compared(
    graph: Graph, on_cpu: Callable[[], Engine], on_gpu: Callable[[], Engine] | None, verbose: bool
) -> list[OutputResult]:
    """The reference against the CPU, or with ``on_gpu`` the CPU against that, over all passes of ``graph``."""
    cpu = BindingRunner(ON_CPU, graph, on_cpu)
    if on_gpu is None:
        runners = [FunctionRunner(graph.reference_name, graph), cpu]
    else:
        runners = [cpu, BindingRunner(ON_GPU, graph, on_gpu)]
    within = SimpleCompareFunc(
        atol=graph.tolerances, rtol=dict.fromkeys(graph.tolerances, 0.0), infinities_compare_equal=True
    )
    with _report(verbose), np.errstate(all="ignore"):  # its report squares all values: infinities, a head's -1e30
        runs = Comparator.run(runners, data_loader=list(graph.feeds))
        (accuracy,) = Comparator.compare_accuracy(runs, compare_func=within)
    ((_, passes),) = accuracy.items()
    return [_result(graph, output, [found[output] for found in passes]) for output in graph.tolerances]


def _result(graph: Graph, output: str, passes: list[Any]) -> OutputResult:
    def largest(name: str) -> float:
        return max(float(getattr(found, name, np.inf)) for found in passes)

    return OutputResult(
        graph.path,
        output,
        len(passes),
        largest("max_absdiff"),
        largest("max_reldiff"),
        graph.tolerances[output],
        all(bool(found) for found in passes),
    )


@contextlib.contextmanager
def _report(verbose: bool) -> Iterator[None]:
    """Polygraphy's lines on standard error, or nowhere."""
    severity = G_LOGGER.INFO if verbose else G_LOGGER.CRITICAL
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr if verbose else nowhere))
        stack.enter_context(G_LOGGER.verbosity(severity))
        yield
