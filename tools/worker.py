"""A contender's process: loads one library's models, then answers requests. The protocol is in contenders.py."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.engines.hugepages import restart_with_huge_pages
from specrt.engines.manifest import ModelEntry, manifest_from_bundle

Json = dict[str, Any]
Generate = Callable[[Json], Json]


@dataclass(frozen=True)
class Settings:
    """What a process serves, as its only argument in JSON. ``dtype`` is transformers'; specrt has its bundle's."""

    library: str
    dtype: str
    bundle: str
    threads: int
    with_draft: bool


class _FirstTokens:
    """A transformers streamer that only notes when the first ids came, and how many."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.count = 0
        self._saw_prompt = False

    def put(self, ids: Any) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
        elif self.at is None:
            self.at, self.count = time.perf_counter(), int(ids.numel())

    def end(self) -> None:
        return


def _specrt(settings: Settings) -> tuple[Json, Generate]:
    import specrt

    runtime = specrt.load(settings.bundle, threads=settings.threads)

    def generate(request: Json) -> Json:
        started = time.perf_counter()
        result = runtime.generate(
            request["prompt_ids"],
            max_new_tokens=request["max_new_tokens"],
            num_speculative_tokens=request["k"],
            draft=request["draft"],
            ignore_eos=request["ignore_eos"],
        )
        seconds, stats = time.perf_counter() - started, result.stats
        return {
            "token_ids": result.token_ids,
            "seconds": seconds,
            "first_token_seconds": stats.prefill_ms / 1e3,
            "num_first_tokens": min(1, stats.completion_tokens),
            "stats": {name: getattr(stats, name) for name in ("rounds", "drafted", "accepted", "own")},
        }

    return {"backend": runtime.backend}, generate


def _transformers(settings: Settings) -> tuple[Json, Generate]:
    from specrt.tools.progress import quiet_libraries

    quiet_libraries()
    import torch
    from transformers import GenerationConfig

    torch.set_num_threads(settings.threads)
    manifest = manifest_from_bundle(Path(settings.bundle))
    model = _load(manifest.target, settings.dtype)
    assistant = None
    if settings.with_draft:
        entry = manifest.draft.model
        assistant = model if entry is None else _load(entry, settings.dtype)

    def generate(request: Json) -> Json:
        """Greedy, whatever the model's own generation defaults are; a draft of K tokens a round, as in specrt."""
        assisted = {"assistant_model": assistant} if request["draft"] == "model" else {}
        if assistant is not None and assisted:
            assistant.generation_config.num_assistant_tokens = request["k"]
        ids = torch.tensor([request["prompt_ids"]])  # [1, N] i64
        clock = _FirstTokens()
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=request["max_new_tokens"],
            eos_token_id=None if request["ignore_eos"] else list(manifest.eos_token_ids) or None,
            pad_token_id=0,
            prompt_lookup_num_tokens=request["k"] if request["draft"] == "ngram" else None,
        )
        started = time.perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock, **assisted
        )
        seconds = time.perf_counter() - started
        return {
            "token_ids": output[0, ids.shape[1] :].tolist(),
            "seconds": seconds,
            "first_token_seconds": seconds if clock.at is None else clock.at - started,
            "num_first_tokens": clock.count,
            "stats": {},
        }

    return {"attention": model.config._attn_implementation, "dtype": str(model.dtype)}, generate


def _load(entry: ModelEntry, dtype: str) -> Any:
    import torch
    from transformers import GenerationConfig

    from specrt.exporter.source import find_source

    model = find_source(entry.source, entry.revision).load_model({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return model


_LIBRARIES: dict[str, Callable[[Settings], tuple[Json, Generate]]] = {"specrt": _specrt, "transformers": _transformers}


def _read_lines(lines: queue.SimpleQueue[str]) -> None:
    """Hand on the lines of standard input; its end ends the process, in the middle of a generation too."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _failure(error: Exception) -> Json:
    line = " ".join(str(error).split()) or type(error).__name__
    return {"error": line[:400], "exit_code": getattr(error, "exit_code", 1)}


def main() -> None:
    """Load, say so, and answer line by line. Libraries that print get standard error instead of our standard output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; our input ends when it does
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
    try:
        settings = Settings(**json.loads(sys.argv[1]))
        reply, generate = _LIBRARIES[settings.library](settings)
    except Exception as error:  # foreign libraries raise what they like; the parent shows one line
        replies.write(json.dumps(_failure(error)) + "\n")
        return
    while True:
        replies.write(json.dumps(reply) + "\n")
        try:
            reply = generate(json.loads(lines.get()))
        except Exception as error:
            reply = _failure(error)


if __name__ == "__main__":
    if '"library": "specrt"' in sys.argv[1]:
        restart_with_huge_pages()  # as 'specrt generate' does; eager was measured with and without: no difference
    main()
