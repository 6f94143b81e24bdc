"""Requests of a method's process that llama.cpp answers, with the package ``xllamacpp``.

llama.cpp's own server runs in this process and is called on a loopback port: its native endpoint takes prompt ids and
streams ids. It reads the GGUF file directly, with the quantized weights that the bundle's graph has dequantized.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from specrt.engines.errors import SourceError, SpecrtError, UsageError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.tools.bench.torch_worker import Generate, Json, Settings
from specrt.tools.machine import peak_bytes

INSTALL = "pip install 'specrt[llama-cpp]'"


def check_llama_cpp(manifest: Manifest, sources: Mapping[str, str]) -> Path:
    """The GGUF file for llama.cpp. Raises ``UsageError`` when the package or the file is missing."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError(f"llama.cpp: the package xllamacpp is not installed; {INSTALL}, or leave it out")
    name = sources.get("gguf", sources.get("target", manifest.target.source))
    if Path(name).suffix.lower() != ".gguf":
        raise UsageError(
            f"llama.cpp: got the source {name}, expected a .gguf file; name one with --gguf, or leave it out"
        )
    if not Path(name).is_file():
        raise SourceError(f"llama.cpp: {name}: no such file; name the GGUF file with --gguf, or leave llama.cpp out")
    return Path(name)


def serve_llama_cpp(settings: Settings) -> tuple[Json, Generate]:
    """Load the GGUF file with llama.cpp's own defaults, one slot, and no cache between prompts."""
    manifest = manifest_from_bundle(Path(settings.bundle))
    file = check_llama_cpp(manifest, settings.sources)
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(file)
    for threads in (options.cpuparams, options.cpuparams_batch):
        threads.n_threads = settings.threads
    options.n_ctx, options.n_parallel, options.cache_ram_mib = manifest.target.spec.max_seq_len, 1, 0
    options.ui, options.verbosity = False, -1
    server = xllamacpp.Server(options)  # it stops with its last reference
    eos_ids = frozenset(manifest.eos_token_ids)

    def generate(request: Json) -> Json:
        ends = frozenset() if request["ignore_eos"] else eos_ids
        return answer(str(urlsplit(server.listening_address).netloc), request, ends)

    version = importlib.metadata.version("xllamacpp")
    kernels = " ".join(str(xllamacpp.get_system_info()).split())
    return {"gguf": file.name, "xllamacpp": version, "kernels": kernels}, generate


def answer(address: str, request: Json, ends: frozenset[int]) -> Json:
    """Generate once. The stream omits ids that end within a character; in that case all ids are requested again.

    Raises ``SpecrtError``.
    """
    num_prompt, most, body = len(request["prompt_ids"]), request["max_new_tokens"], _body(request)
    started = time.perf_counter()
    ids, arrivals, last = _read(_events(address, body), started, ends)
    seconds = time.perf_counter() - started
    if last.get("tokens_evaluated") != num_prompt:
        raise SpecrtError(f"llama.cpp: read {last.get('tokens_evaluated')} ids, expected the prompt's {num_prompt}")
    if last["tokens_predicted"] != len(ids):
        (whole,) = _events(address, {**body, "stream": False})
        ids, arrivals = merged(whole["tokens"][: min(most, last["tokens_predicted"])], ids, arrivals, seconds)
    times = {"seconds": seconds, "arrivals": arrivals, "peak_bytes": peak_bytes()}
    return {"token_ids": ids, **times, "rounds": [], "phase_ms": {}}


def _body(request: Json) -> Json:
    """The native request. Only the temperature is applied, since the bench uses no other filter."""
    return {
        "prompt": request["prompt_ids"],
        "n_predict": request["max_new_tokens"],
        "temperature": request.get("temperature", 0.0),
        "seed": request.get("seed", 0),
        "samplers": ["temperature"],
        "ignore_eos": request["ignore_eos"],
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }


def _events(address: str, body: Json) -> Iterator[Json]:
    """The server's events as they arrive; closing the iterator ends the request. Raises ``SpecrtError``."""
    connection = HTTPConnection(address)
    try:
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SpecrtError(f"llama.cpp: status {response.status}: {response.read().decode(errors='replace')[:300]}")
        if not body["stream"]:
            yield json.loads(response.read())
            return
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])
            elif line.startswith(b"error: "):
                raise SpecrtError(f"llama.cpp: {line.decode(errors='replace').strip()[:300]}")
    finally:
        connection.close()


def _read(events: Iterator[Json], started: float, ends: frozenset[int]) -> tuple[list[int], list[list[float]], Json]:
    """(ids, arrivals, the last event). Generation ends at an id of ``ends``, as for the other methods.

    llama.cpp also has its own ends, from the GGUF file. With ``ignore_eos`` it never generates them.
    """
    ids: list[int] = []
    arrivals: list[list[float]] = []
    event: Json = {}
    for event in events:
        if event["tokens"]:
            ids += event["tokens"]
            arrivals.append([time.perf_counter() - started, len(event["tokens"])])
        if ends.intersection(event["tokens"]):
            break
    return ids, arrivals, event


def merged(
    whole: Sequence[int], streamed: Sequence[int], arrivals: Sequence[Sequence[float]], seconds: float
) -> tuple[list[int], list[list[float]]]:
    """Ids and arrivals of a stream without the ids that end within a character, which arrive with the next one.

    ``whole`` are all ids of the same greedy answer. Raises ``SpecrtError`` if the stream is not part of them.
    """
    found: list[list[float]] = []
    place = 0
    times = [at for at, count in arrivals for _ in range(int(count))]
    for token, at in zip(streamed, times, strict=True):
        ahead = next((n for n, other in enumerate(whole[place:], 1) if other == token), None)
        if ahead is None:
            raise SpecrtError(f"llama.cpp: returned other ids for the same request: id {token} after {place} ids")
        found.append([at, ahead])
        place += ahead
    if place < len(whole):
        found.append([seconds, len(whole) - place])
    return list(whole), found
