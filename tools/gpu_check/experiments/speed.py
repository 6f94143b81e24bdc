"""Times on the device: layers of a 1.5B model, and a round as one CUDA graph."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from specrt.engines.contract import INPUT_IDS, LOGITS, NUM_ACCEPTED, ROW_INDICES, TOKENS
from specrt.engines.errors import SpecrtError
from specrt.engines.gpu import device as gpu
from specrt.engines.interface import Array, Binding, write_pass
from specrt.engines.samplers import MATCH, sampler_contract
from specrt.engines.trt.library import LIBRARIES
from specrt.tools.gpu_check.experiment import Failed, Notes, Skip
from specrt.tools.gpu_check.experiments.kernels import kernel_ms
from specrt.tools.gpu_check.experiments.places import Place, on_each, on_tensorrt
from specrt.tools.gpu_check.experiments.timing import host_us, pass_ms
from specrt.tools.gpu_check.kit import Kit

START = 64  # cached tokens before the passes of layers


def check_layers(kit: Kit, notes: Notes) -> None:
    """Two layers of a 1.5B's shape: the time by width, the host's time a pass, the gaps that it leaves, and the bytes
    that a pass reads a second."""
    if kit.layers is None:
        raise Skip("needs layers of a kit; make one with 'make gpu-kit'")
    reasons = {}
    for name in LIBRARIES:
        try:
            place = on_tensorrt(kit.layers, name, is_target_alone=True)
        except SpecrtError as error:
            reasons[name] = str(error)
            continue
        notes.add(name, _layers_of(place))
    if len(reasons) == len(LIBRARIES):
        raise Skip("; ".join(reasons.values()))


def _layers_of(place: Place) -> dict[str, Any]:
    entry, engine = place.model()
    figures: dict[str, Any] = {}
    for name, uses_graphs in (("CUDA graphs", True), ("no CUDA graphs", False)):
        place.backend.uses_graphs = uses_graphs  # type: ignore[attr-defined]
        binding = engine.open()
        times = {width: pass_ms(binding, width, START) for width in range(1, entry.spec.max_rows + 1)}
        figures[name] = {
            "ms by width": times,
            "v(M)": {width: ms / times[1] for width, ms in times.items()},
            "host us a pass": host_us(binding, 1),
            "launch gap us": (pass_ms(binding, 1, START, runs=1) - times[1]) * 1e3,
            "GB/s at width 1": entry.bytes_per_pass / times[1] / 1e6,
        }
        if not uses_graphs:
            figures["ms by kernel at width 1"] = kernels = kernel_ms(engine, binding, 1, START)
            if isinstance(kernels, dict):
                figures["us between kernels at width 1"] = (times[1] - sum(kernels.values())) * 1e3
        binding.close()
    return figures


def check_round_graph(kit: Kit, notes: Notes) -> None:
    """A round of passes and samplers captured as one CUDA graph, against one graph for each pass."""
    on_each(kit, notes, _round_of)


class _Round:
    """K drafted tokens and their verification: passes, samplers, and copies of ids on the device; no host between."""

    def __init__(self, place: Place) -> None:
        manifest = place.manifest
        vocab = manifest.target.spec.vocab_size
        self.k = manifest.num_speculative_tokens
        self.bindings: list[Binding] = []
        for role in ("draft", "target"):
            entry, engine = place.model(role)
            model = engine.open()
            memory = {name: model.memory[name] for name in (LOGITS, INPUT_IDS, ROW_INDICES)}
            contract = sampler_contract(MATCH, entry.spec, vocab)
            self.bindings += [model, place.backend.load(entry.samplers[MATCH], contract).open(memory)]
            width = 1 if role == "draft" else self.k + 1
            write_pass(model.host, np.full(width, 4), 0, width)
            model.upload()

    def enqueue(self) -> bool:
        draft, draft_sampler, target, sampler = self.bindings
        for step in range(self.k):
            draft.run(1, 1)
            draft_sampler.run(1, 1)
            token = draft_sampler.memory[TOKENS][:1]
            target.take(INPUT_IDS, step + 1, token)
            draft.take(INPUT_IDS, 0, token)
        target.run(self.k + 1, self.k + 1)
        sampler.run(self.k + 1, self.k + 1)
        return True

    def read(self) -> list[Array]:
        return self.bindings[-1].read(TOKENS, NUM_ACCEPTED)

    def restart(self) -> None:
        """The draft begins with the same id again."""
        self.bindings[0].upload()

    def close(self) -> None:
        for binding in reversed(self.bindings):
            binding.close()


def _round_of(place: Place) -> dict[str, Any]:
    apart = _Round(place)
    figures, expected = {}, None
    figures["ms a round, by pass"], expected = _timed(apart, apart.enqueue)
    apart.close()
    if hasattr(place.backend, "uses_graphs"):
        place.backend.uses_graphs = False  # a pass must not capture within the capture of a round
    whole = _Round(place)
    figures["ms a round, no graphs"], _ = _timed(whole, whole.enqueue)
    opened = gpu.open_device()
    api, graph = opened.api, None
    with contextlib.suppress(SpecrtError), opened.lock:
        graph = api.capture(whole.enqueue)
    if graph is None:
        whole.close()
        raise Failed(f"a round cannot be captured as one CUDA graph ({figures})")
    figures["ms a round, one graph"], found = _timed(whole, lambda: api.launch(graph))
    opened.wait()
    api.drop(graph)
    whole.close()
    if not all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True)):
        raise Failed(f"one graph gives {found[0].tolist()}, graphs by pass give {expected[0].tolist()}")
    return figures


def _timed(made: _Round, enqueue: Callable[[], object], num_rounds: int = 30) -> tuple[float, list[Array]]:
    """(ms a round with its wait, what the last one gave)"""
    seconds, found = 0.0, []
    for number in range(num_rounds + 5):
        made.restart()
        made.bindings[0].read(LOGITS)
        started = time.perf_counter()
        enqueue()
        found = made.read()
        seconds += time.perf_counter() - started if number >= 5 else 0.0
    return seconds / num_rounds * 1e3, found
