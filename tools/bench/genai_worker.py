"""Requests of a method's process that ONNX Runtime GenAI answers, with the package onnxruntime-genai."""

from __future__ import annotations

import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from specrt.engines.manifest import manifest_from_bundle
from specrt.tools.bench.genai_model import PACKAGE, check_genai, genai_model
from specrt.tools.bench.torch_worker import Generate, Json, Settings
from specrt.tools.machine import peak_bytes


def serve_genai(settings: Settings) -> tuple[Json, Generate]:
    """Load the model folder with GenAI's own defaults, except for the threads and the ids that end a text."""
    bundle = Path(settings.bundle)
    manifest = manifest_from_bundle(bundle)
    folder = genai_model(bundle, manifest, settings.sources)
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    options = {"intra_op_num_threads": settings.threads}
    decoder = {"decoder": {"session_options": options}}
    ends = {"eos_token_id": list(manifest.eos_token_ids)} if manifest.eos_token_ids else {}
    config.overlay(json.dumps({"model": {**decoder, **ends}}))
    model = genai.Model(config)

    def generate(request: Json) -> Json:
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(**search_options(request))
        return answer(genai.Generator(model, parameters), request["prompt_ids"])

    return {"genai": importlib.metadata.version(PACKAGE), "precision": check_genai(manifest)}, generate


def search_options(request: Json) -> dict[str, Any]:
    """GenAI's names for the request. Only the temperature is applied; ``min_length`` keeps ends from being chosen."""
    most = len(request["prompt_ids"]) + request["max_new_tokens"]
    options: dict[str, Any] = {"max_length": most, "min_length": most if request["ignore_eos"] else 0}
    if temperature := request.get("temperature", 0.0):
        seed = request.get("seed", 0)
        return {**options, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "random_seed": seed}
    return {**options, "do_sample": False}


def answer(generator: Any, prompt_ids: list[int]) -> Json:
    """Generate once, from an empty cache."""
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    started = time.perf_counter()
    generator.append_tokens(np.array([prompt_ids], np.int32))  # [1, N]
    while not generator.is_done():
        generator.generate_next_token()
        ids.append(int(generator.get_next_tokens()[0]))
        arrivals.append((time.perf_counter() - started, 1))
    times = {"seconds": time.perf_counter() - started, "arrivals": arrivals, "peak_bytes": peak_bytes()}
    return {"token_ids": ids, **times, "rounds": [], "phase_ms": {}}
