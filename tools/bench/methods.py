"""The methods of a bench, each in its own process if there is enough memory.

The thread pools and memory of torch and onnxruntime are thus separate. If memory is short, one process serves all
methods with the same weights. Parent and worker exchange lines of JSON over the worker's standard input and output:

    started   {"attention": "sdpa", ...}
    request   {"prompt_ids": [...], "max_new_tokens": 64, "draft": "none", "k": 0, "ignore_eos": false, ...}
    answer    {"token_ids": [...], "seconds": 1.5, "arrivals": [[0.2, 1], ...], "peak_bytes": 0, "rounds": [], ...}
    failure   {"error": "one line", "exit_code": 1}

A worker sleeps between requests and ends when its standard input is closed, which includes the death of the parent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrt.engines.codec import from_json
from specrt.engines.contract import ITEM_BYTES
from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import Manifest

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PROCESS_BYTES = {
    "transformers": 600 << 20,
    "transformers-compiled": 900 << 20,
    "specrt": 140 << 20,
    "llama.cpp": 300 << 20,
    "genai": 200 << 20,
}
GGUF_BYTES = 1.3  # a weight in 4 bits: the file is mapped, and part of it repacked for the CPU's kernels


@dataclass(frozen=True)
class Method:
    """A way to generate. ``eager`` is transformers' ``generate`` with its defaults: not compiled, with sdpa.

    ``llama.cpp`` reads the GGUF file that the bundle came from, with its quantized weights; ``genai`` is ONNX Runtime
    GenAI with a model that its own builder makes from the target.
    """

    name: str
    library: str
    dtype: str
    draft: str = "none"

    @property
    def process(self) -> tuple[str, str]:
        """(library, dtype): methods that have these in common can share a process."""
        return self.library, self.dtype


_ROWS = (
    Method("eager", "transformers", "fp32"),
    Method("eager-bf16", "transformers", "bf16"),
    Method("eager-compiled", "transformers-compiled", "fp32"),
    Method("assisted", "transformers", "fp32", "model"),
    Method("assisted-bf16", "transformers", "bf16", "model"),
    Method("lookup", "transformers", "fp32", "ngram"),
    Method("llama.cpp", "llama.cpp", "gguf"),
    Method("genai", "genai", "bundle"),
    Method("plain", "specrt", "bundle"),
    Method("auto", "specrt", "bundle", "auto"),
    Method("ngram", "specrt", "bundle", "ngram"),
    Method("model", "specrt", "bundle", "model"),
)
METHODS = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class Answer:
    """New ids and wall-clock times in s. ``arrivals`` are (s since the request, new ids), as a reader sees them.

    ``rounds`` are (drafted, accepted) of each round, ``phase_ms`` sums over the rounds; only specrt has them.
    ``peak_bytes`` is the largest resident memory of the process so far.
    """

    token_ids: tuple[int, ...]
    seconds: float
    arrivals: tuple[tuple[float, ...], ...] = ()
    rounds: tuple[tuple[int, ...], ...] = ()
    phase_ms: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0][0] if self.arrivals else self.seconds

    @property
    def num_first_tokens(self) -> int:
        """The number of ids that arrived first, at the same time."""
        return int(self.arrivals[0][1]) if self.arrivals else len(self.token_ids)

    @property
    def after_first(self) -> Answer:
        """The answer without the first ids and the time before them."""
        return Answer(self.token_ids[self.num_first_tokens :], self.seconds - self.first_token_seconds)

    @property
    def gaps_ms(self) -> list[float]:
        """Time between consecutive ids, 0 for those that arrived together."""
        gaps: list[float] = []
        before = self.first_token_seconds
        for at, count in self.arrivals:
            gaps += [(at - before) * 1e3, *[0.0] * (int(count) - 1)]
            before = at
        return gaps[1:]


def choose_methods(names: str, manifest: Manifest) -> tuple[Method, ...]:
    """Methods by comma-separated names. Raises ``UsageError`` for unknown ones and those whose draft is missing."""
    chosen = []
    for name in dict.fromkeys(name.strip() for name in names.split(",")):
        if name not in METHODS:
            raise UsageError(f"methods: got {name!r}, expected some of {', '.join(METHODS)}")
        if METHODS[name].draft == "model" and manifest.draft.kind == "ngram":
            raise UsageError(f"methods: {name} drafts with a model, but this bundle has none; leave it out")
        chosen.append(METHODS[name])
    return tuple(chosen)


def own_or_shared(manifest: Manifest, methods: Sequence[Method], available_bytes: int) -> list[list[Method]]:
    """A process for each method if all fit into ``available_bytes`` together, else one for those that can share."""
    alone = [[method] for method in methods]
    needed = sum(needed_bytes(manifest, group) for group in alone)
    return alone if needed <= available_bytes else processes(methods)


def processes(methods: Sequence[Method]) -> list[list[Method]]:
    """The methods by process, in the order of their first member."""
    keys = dict.fromkeys(method.process for method in methods)
    return [[method for method in methods if method.process == key] for key in keys]


def needed_bytes(manifest: Manifest, methods: Sequence[Method]) -> int:
    """An estimate of the memory that one process with ``methods`` needs once it is loaded.

    ONNX Runtime copies weights into the layout of its kernels; their file is only in the page cache.
    """
    library, dtype = methods[0].process
    models = [manifest.target]
    if manifest.draft.model is not None and (library == "specrt" or any(c.draft == "model" for c in methods)):
        models.append(manifest.draft.model)
    if library in ("specrt", "genai"):
        return PROCESS_BYTES[library] + sum(model.weights_bytes + model.spec.kv_bytes for model in models)
    item_bytes = GGUF_BYTES if library == "llama.cpp" else ITEM_BYTES[DTYPES[dtype]]
    num_parameters = sum(model.weights_bytes // ITEM_BYTES[model.spec.dtype] for model in models)
    return PROCESS_BYTES[library] + int(num_parameters * item_bytes)


class Worker:
    """A process that answers requests; ``started`` is its first reply, sent once it has loaded. Close it when done."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        try:
            self.started: dict[str, Any] = self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request. Raises ``SpecrtError`` with the worker's own line when it fails."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        return self._receive()

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            failure = SpecrtError(f"{self.name}: {reply['error']}")
            failure.exit_code = reply["exit_code"]
            raise failure
        return reply

    def _ended(self) -> SpecrtError:
        status = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no message"])[-1]
        fix = "; signal 9 often means too little memory: use fewer methods" if status == -9 else ""
        return SpecrtError(f"{self.name}: its process ended with status {status} ({last}){fix}")


class WorkerPool:
    """Methods with their processes loaded, one after the other so that the peaks of loading do not add up.

    ``failed`` has the reason for each missing method; ``ask`` raises for those. ``required`` ones raise at once.
    ``started`` is the first reply of each method's process.
    """

    def __init__(
        self,
        bundle: Path,
        groups: Sequence[Sequence[Method]],
        threads: int,
        sources: Mapping[str, str] | None = None,
        required: Collection[str] | None = None,
    ) -> None:
        self._workers: dict[str, Worker] = {}
        self.failed: dict[str, str] = {}
        self.started: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            for group in groups:
                try:
                    worker = stack.enter_context(_start(bundle, group, threads, sources or {}))
                except SpecrtError as error:
                    if required is None or any(method.name in required for method in group):
                        raise
                    self.failed.update({method.name: str(error) for method in group})
                    continue
                self._workers.update({method.name: worker for method in group})
                self.started.update({method.name: worker.started for method in group})
            self._stack = stack.pop_all()

    def ask(self, method: Method, prompt_ids: Sequence[int], k: int, **limits: Any) -> Answer:
        """Generate once. ``limits`` are ``max_new_tokens``, ``ignore_eos``, and ``temperature`` and ``seed``."""
        draft_k = 0 if method.draft == "none" else k
        reply = self._workers[method.name].ask(prompt_ids=list(prompt_ids), draft=method.draft, k=draft_k, **limits)
        return from_json(Answer, reply)

    def time_passes(self, method: Method, past: int) -> dict[str, Any]:
        """``target_ms`` of passes of 1, 2, ... K + 1 tokens and ``draft_ms`` of one, by a method of specrt."""
        return self._workers[method.name].ask(time_passes=past)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _start(bundle: Path, group: Sequence[Method], threads: int, sources: Mapping[str, str]) -> Worker:
    library, dtype = group[0].process
    settings = {
        "library": library,
        "dtype": dtype,
        "bundle": str(bundle),
        "threads": threads,
        "with_draft": any(method.draft == "model" for method in group),
        "sources": dict(sources),
    }
    return Worker(f"{library} {dtype}", [sys.executable, "-m", "specrt.tools.bench.worker", json.dumps(settings)])
