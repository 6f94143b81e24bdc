"""Requests of a method's process that specrt or transformers answers.

Both report when ids arrive for a reader of the stream: specrt's stream yields final text, transformers calls a
streamer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrt.engines.manifest import ModelEntry, manifest_from_bundle
from specrt.tools.machine import peak_bytes

COMPILED_LENGTHS = (9, 21)
Json = dict[str, Any]
Generate = Callable[[Json], Json]


@dataclass(frozen=True)
class Settings:
    """The configuration of a process, which is its only argument, as JSON. ``dtype`` is for transformers only.

    ``sources`` may give the torch models ``target`` and ``draft``, in place of those recorded in the bundle.
    """

    library: str
    dtype: str
    bundle: str
    threads: int
    with_draft: bool
    sources: dict[str, str] = field(default_factory=dict)


def serve_specrt(settings: Settings) -> tuple[Json, Generate]:
    """Open the bundle; time bare passes on request. Every prompt is prefilled completely, as in transformers."""
    import specrt
    from specrt.tools.tune.timing import FILLER, time_passes

    runtime = specrt.load(settings.bundle, threads=settings.threads)

    def generate(request: Json) -> Json:
        if "time_passes" in request:
            target_ms, draft_ms = time_passes(runtime, request["time_passes"])
            return {"target_ms": target_ms, "draft_ms": draft_ms}
        how = {"num_speculative_tokens": request["k"], "draft": request["draft"]}
        runtime.generate([FILLER] * 3, max_new_tokens=3, ignore_eos=True, **how)  # so that no cache has the prompt
        started = time.perf_counter()
        stream = runtime.stream(
            request["prompt_ids"],
            max_new_tokens=request["max_new_tokens"],
            **how,
            ignore_eos=request["ignore_eos"],
            temperature=request.get("temperature", 0.0),
            **({"seed": request["seed"]} if request.get("temperature") else {}),
        )
        arrivals, seen = [], 0
        for _ in stream:
            arrivals.append((time.perf_counter() - started, len(stream.token_ids) - seen))
            seen = len(stream.token_ids)
        seconds, stats = time.perf_counter() - started, stream.stats
        if seen < len(stream.token_ids):  # the last ids, such as EOS, have no text
            arrivals.append((seconds, len(stream.token_ids) - seen))
        phases = {
            "prefill": stats.prefill_ms,
            "draft": stats.draft_ms,
            "verify": stats.verify_ms,
            "host": stats.host_ms,
        }
        return {
            "token_ids": stream.token_ids,
            "seconds": seconds,
            "arrivals": arrivals,
            "rounds": [(len(done.drafted), done.num_accepted) for done in stream.rounds if not done.is_prefill],
            "phase_ms": phases,
            "peak_bytes": peak_bytes(),
        }

    return {"backend": runtime.backend}, generate


class _Arrivals:
    """A transformers streamer that only records when ids arrived, and how many."""

    def __init__(self, started: float) -> None:
        self.found: list[tuple[float, int]] = []
        self._started = started
        self._saw_prompt = False

    def put(self, ids: Any) -> None:
        if self._saw_prompt:
            self.found.append((time.perf_counter() - self._started, int(ids.numel())))
        self._saw_prompt = True

    def end(self) -> None:
        return


def serve_transformers(settings: Settings) -> tuple[Json, Generate]:
    """Load the torch models that the bundle was exported from."""
    from specrt.tools.terminal.progress import quiet_libraries

    quiet_libraries()
    import torch
    from transformers import GenerationConfig

    torch.set_num_threads(settings.threads)
    manifest = manifest_from_bundle(Path(settings.bundle))
    model = _load(manifest.target, settings.dtype, settings.sources.get("target"))
    compiled = settings.library == "transformers-compiled"
    if compiled:
        model.forward = torch.compile(model.forward, dynamic=True)
        _compile_now(model)
    assistant = None
    if settings.with_draft:
        entry = manifest.draft.model
        assistant = model if entry is None else _load(entry, settings.dtype, settings.sources.get("draft"))

    def generate(request: Json) -> Json:
        """Generate with K drafted tokens per round, as in specrt, regardless of the model's generation defaults."""
        assisted = {"assistant_model": assistant} if request["draft"] == "model" else {}
        if assistant is not None and assisted:
            assistant.generation_config.num_assistant_tokens = request["k"]
        ids = torch.tensor([request["prompt_ids"]])  # [1, N] i64
        temperature = request.get("temperature", 0.0)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        config = GenerationConfig(
            **(sampling or {"do_sample": False}),
            max_new_tokens=request["max_new_tokens"],
            eos_token_id=None if request["ignore_eos"] else list(manifest.eos_token_ids) or None,
            pad_token_id=0,
            prompt_lookup_num_tokens=request["k"] if request["draft"] == "ngram" else None,
        )
        torch.manual_seed(request.get("seed", 0))
        started = time.perf_counter()
        clock = _Arrivals(started)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **assisted
        )
        return {
            "token_ids": output[0, ids.shape[1] :].tolist(),
            "seconds": time.perf_counter() - started,
            "arrivals": clock.found,
            "peak_bytes": peak_bytes(),
            "rounds": [],
            "phase_ms": {},
        }

    return {"attention": model.config._attn_implementation, "dtype": str(model.dtype), "compiled": compiled}, generate


def _compile_now(model: Any) -> None:
    """Run prompts of two lengths and a decoding step, so that no measured answer waits for the compiler."""
    import torch

    for length in COMPILED_LENGTHS:
        ids = torch.full((1, length), 5)  # [1, N] i64; any id
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)


def _load(entry: ModelEntry, dtype: str, source: str | None) -> Any:
    import torch
    from transformers import GenerationConfig

    model = load_entry(entry, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], source)[1]
    model.generation_config = GenerationConfig()
    return model


def load_entry(entry: ModelEntry, dtype: Any, source: str | None) -> tuple[Any, Any]:
    """(the source of the torch model of ``entry``, the model in ``dtype``); ``source`` replaces the recorded one."""
    from specrt.exporter.sources.adapters import AdapterChoice, find_adapted
    from specrt.exporter.sources.merging import load_adapted

    adapter = entry.adapter
    choice = AdapterChoice(ignore=True) if adapter is None else AdapterChoice(adapter.source, adapter.revision)
    found = find_adapted(source or entry.source, entry.revision if source is None else None, choice=choice)
    return found, load_adapted(found, dtype).model
