"""The processes of ``http_latency``: servers that it asks by HTTP, and libraries that it asks by a pipe.

``python -m specrt.tools.lab.http_peers '{"kind": ..., "bundle": ..., "threads": ..., "gguf": ...}'`` is one of them. It
prints a line when it is ready, with an address if it is a server, and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrt.engines.errors import SpecrtError, one_line
from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench.remote.clients import Client, HttpClient, LibraryClient, Timing
from specrt.tools.prompting.prompts import Prompt

MODULE = "specrt.tools.lab.http_peers"
NUM_SLOTS = 4


@dataclass(frozen=True)
class Peer:
    """A process: ``kind`` is ``library``, ``server``, ``llama-server`` or ``genai``. ``label`` is for people."""

    kind: str
    bundle: str
    threads: int
    gguf: str | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return self.kind + self.label

    @property
    def weights(self) -> str:
        """What it computes with: peers of equal weights give equal texts."""
        return f"{self.gguf or 'the source'}" if self.kind == "llama-server" else self.bundle


class PipeClient:
    """A library in a process of its own, which measures its times itself. It answers one request at a time."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process, self._turn = name, process, threading.Lock()

    def ask(self, prompt: Prompt, max_new_tokens: int, temperature: float) -> Timing:
        """Generate there. Several clients wait for each other, which is not part of their times."""
        request = {"text": prompt.text, "max_new_tokens": max_new_tokens, "temperature": temperature}
        with self._turn:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            reply = _line_of(self._process, self.name)
        if "error" in reply:
            raise SpecrtError(f"{self.name}: {reply['error']}")
        return Timing(**reply)


@contextmanager
def opened(peer: Peer) -> Iterator[Client]:
    """The client of a process, which ends with the block. Raises ``SpecrtError`` if it does not start."""
    if peer.kind == "server":
        command = ["specrt.tools.cli", "serve", peer.bundle, "--port", "0", "--threads", str(peer.threads)]
        command += ["--max-concurrency", str(NUM_SLOTS), "--no-reproducible", "--served-model-name", "model"]
    else:
        command = [MODULE, json.dumps(asdict(peer))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-m", *command], text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            if peer.kind == "server":
                found = re.search(r"http://[\d.]+:\d+/v1", process.stdout.readline())
                if found is None:
                    raise SpecrtError("specrt serve: it did not start")
                yield HttpClient(found[0])
            else:
                ready = _line_of(process, peer.kind)
                if "error" in ready:
                    raise SpecrtError(f"{peer.kind}: {ready['error']}")
                yield HttpClient(ready["url"]) if "url" in ready else PipeClient(peer.kind, process)
        finally:
            process.terminate()
            process.wait(60)


def _line_of(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SpecrtError(f"{name}: its process has ended")
    found: dict[str, Any] = json.loads(line)
    return found


Ask = Callable[[Prompt, int, float], Timing]


def _library(peer: Peer) -> tuple[dict[str, Any], Ask]:
    import specrt

    client = LibraryClient(specrt.load(peer.bundle, threads=peer.threads))
    return {}, client.ask


def _genai(peer: Peer) -> tuple[dict[str, Any], Ask]:
    """With the ids of the bundle's chat template; encoding and decoding are part of the times, as elsewhere."""
    import time

    from specrt.runtime.text.codec import TextCodec
    from specrt.tools.bench.genai_worker import serve_genai
    from specrt.tools.bench.torch_worker import Settings

    manifest = manifest_from_bundle(Path(peer.bundle))
    codec = TextCodec.from_bundle(Path(peer.bundle), manifest.tokenizer, manifest.target.spec.vocab_size)
    _, generate = serve_genai(Settings("genai", "float32", peer.bundle, peer.threads, False))

    def ask(prompt: Prompt, max_new_tokens: int, temperature: float) -> Timing:
        started = time.perf_counter()
        ids = codec.encode(prompt.messages)
        spent = time.perf_counter() - started
        limits = {"max_new_tokens": max_new_tokens, "temperature": temperature, "ignore_eos": False}
        reply = generate({"prompt_ids": ids, **limits})
        times = [spent + at for at, _ in reply["arrivals"]]
        return Timing(times[0], times[-1], len(reply["token_ids"]), codec.decode(reply["token_ids"]))

    return {}, ask


def _llama_server(peer: Peer) -> tuple[dict[str, Any], Ask]:
    """llama.cpp's own server with its defaults, ``NUM_SLOTS`` slots, and the model's own chat template."""
    import xllamacpp

    manifest = manifest_from_bundle(Path(peer.bundle))
    options = xllamacpp.CommonParams()
    options.model.path = peer.gguf or manifest.target.source
    for threads in (options.cpuparams, options.cpuparams_batch):
        threads.n_threads = peer.threads
    options.n_ctx, options.n_parallel = NUM_SLOTS * manifest.target.spec.max_seq_len, NUM_SLOTS
    options.ui, options.verbosity = False, -1
    server = xllamacpp.Server(options)

    def ask(prompt: Prompt, max_new_tokens: int, temperature: float) -> Timing:
        raise SpecrtError(f"it is asked at {server.listening_address}")

    return {"url": f"{server.listening_address}/v1"}, ask


KINDS: dict[str, Callable[[Peer], tuple[dict[str, Any], Ask]]] = {
    "library": _library,
    "genai": _genai,
    "llama-server": _llama_server,
}


def main() -> None:
    """Load, report that, and answer line by line. Libraries that print get standard error instead of our output."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peer = Peer(**json.loads(sys.argv[1]))
    try:
        ready, ask = KINDS[peer.kind](peer)
    except Exception as error:  # libraries raise errors of any type
        replies.write(json.dumps({"error": one_line(error, limit=300)}) + "\n")
        return
    replies.write(json.dumps(ready) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        try:
            done = ask(Prompt("asked", request["text"]), request["max_new_tokens"], request["temperature"])
            reply = asdict(done)
        except Exception as error:
            reply = {"error": one_line(error, limit=300)}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
