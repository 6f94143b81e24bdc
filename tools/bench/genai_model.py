"""The model folder of ONNX Runtime GenAI: built by its own model builder from the bundle's target, once, in the cache.

The target is loaded as the export loads it (GGUF and pre-quantized weights as floats, an adapter merged) and saved as a
Hugging Face folder in fp32, which the builder reads. ``python -m specrt.tools.bench.genai_model BUNDLE FOLDER`` saves
that folder; it runs in a process of its own, so that the memory of torch is not counted as that of the method.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from specrt.engines.errors import SpecrtError, UsageError
from specrt.engines.manifest import Manifest, ModelEntry, manifest_from_bundle
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.folders import new_folder
from specrt.engines.storage.home import cache_dir
from specrt.tools.bench.torch_worker import load_entry

PACKAGE = "onnxruntime-genai"
INSTALL = "pip install 'specrt[genai]'"
PRECISIONS = {("float32", "none"): "fp32", ("float32", "int4"): "int4"}  # by dtype and quantization of the target
MODULE = "specrt.tools.bench.genai_model"
HINT = "set SPECRT_CACHE to another disk, or leave genai out"


def check_genai(manifest: Manifest) -> str:
    """The builder's precision for the bundle's target. Raises ``UsageError`` without one, or without the package."""
    if importlib.util.find_spec("onnxruntime_genai") is None:
        raise UsageError(f"genai: the package {PACKAGE} is not installed; {INSTALL}, or leave genai out")
    _check_onnxruntime()
    target = manifest.target
    precision = PRECISIONS.get((target.spec.dtype, target.quantization))
    if precision is None:
        raise UsageError(
            f"genai: got a target in {target.spec.dtype} with quantization {target.quantization}, expected float32 "
            "with none or int4; leave genai out"
        )
    return precision


def _check_onnxruntime() -> None:
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires(PACKAGE) or ():
        needed = Requirement(text)
        if needed.name == "onnxruntime" and importlib.util.find_spec("onnxruntime") is not None:
            import onnxruntime

            if not needed.specifier.contains(onnxruntime.__version__, prereleases=True):
                version = importlib.metadata.version(PACKAGE)
                raise UsageError(
                    f"genai: got onnxruntime {onnxruntime.__version__}, {PACKAGE} {version} expects "
                    f"{needed.specifier}; {INSTALL}, or leave genai out"
                )


def genai_model(bundle: Path, manifest: Manifest, sources: Mapping[str, str], progress: Progress = SILENT) -> Path:
    """The model folder for the bundle's target, built if it is not in the cache; ``progress`` gets a line before that.

    Raises ``UsageError`` where GenAI cannot run the target, ``SpecrtError`` where its builder fails.
    """
    precision = check_genai(manifest)
    place = cache_dir() / "genai" / _key(manifest.target, sources, precision)
    if (place / "genai_config.json").is_file():
        return place
    progress.note(f"genai: building its {precision} model from the target, once; it is kept in {place}")
    with new_folder(place, hint=HINT) as folder:
        torch, scratch = folder / "torch", folder / "scratch"
        source = [sources["target"]] if "target" in sources else []
        _run("the target cannot be saved for its builder", [MODULE, str(bundle), str(torch), *source])
        arguments = ["-i", str(torch), "-o", str(folder), "-c", str(scratch), "-p", precision, "-e", "cpu"]
        builder = ["onnxruntime_genai.models.builder", *arguments, "--extra_options", "hf_token=false"]
        _run("its builder cannot build this target", builder)
        shutil.rmtree(torch)
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def _key(target: ModelEntry, sources: Mapping[str, str], precision: str) -> str:
    """A name that depends on the weights, the precision and the builder's version."""
    adapter = "" if target.adapter is None else target.adapter.sha256
    parts = [target.fingerprint, adapter, sources.get("target", ""), precision, importlib.metadata.version(PACKAGE)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _run(failure: str, module_and_arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", *module_and_arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise SpecrtError(f"genai: {failure} ({last[:300]}); leave genai out")


def save_target(bundle: Path, folder: Path, source: str | None) -> None:
    """Write the target in fp32 and its tokenizer in transformers' format."""
    import torch

    found, model = load_entry(manifest_from_bundle(bundle).target, torch.float32, source)
    model.hf_quantizer = None  # a GGUF file was dequantized; transformers would refuse to save it as quantized
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    found.tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    save_target(Path(sys.argv[1]), Path(sys.argv[2]), next(iter(sys.argv[3:]), None))
