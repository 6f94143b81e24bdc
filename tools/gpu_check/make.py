"""``make gpu-kit``: write the kit of ``specrt gpu-check``. Needs the libraries of export; the kit does not.

``python -m specrt.tools.gpu_check.make [FILE.tar.gz]``. Weights are random, from a fixed seed.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from specrt.engines.contract import STANDARD_22_DIALECT
from specrt.engines.dialects import oldest_version
from specrt.engines.manifest import MANIFEST_NAME, FileEntry, manifest_from_bundle, manifest_text
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.files import check_writable, write_file, write_text_file
from specrt.engines.storage.integrity import sha256_of
from specrt.engines.trt.build import build
from specrt.tools.gpu_check.forms import AS_EXPORTED, FORMS, KIT_FORMS
from specrt.tools.gpu_check.kit import (
    ATTENTION,
    KIT_FILE,
    KIT_NAME,
    LAYERS,
    ONNXRUNTIME,
    STANDARD,
    STANDARD_22,
    write_seeded,
)
from specrt.tools.gpu_check.rewrite import rewrite_attention

RTX = "tensorrt-rtx"
K, CONTEXT, CHUNK = 3, 96, 32
CONTEXTS = (2048, 8192)
_TEXTS = ("The quick brown fox jumps over the lazy dog.", "def area(radius):\n    return 3.14159 * radius ** 2\n")
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
ONE_LAYER = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1, **HEADS}  # little next to attention
TWO_OF_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2, **HEADS}


def make_kit(output: Path, progress: Progress = SILENT) -> Path:
    """Write the kit to the file ``output``, whole or not at all. Raises ``SpecrtError``."""
    check_writable(output, "choose another file", "the kit")
    with tempfile.TemporaryDirectory() as work:
        folder, models = Path(work, "kit"), Path(work, "models")
        folder.mkdir()
        _pair(folder, models, progress)
        _attention(folder, models, progress)
        _layers(folder, models, progress)
        packed = Path(work, "kit.tar.gz")
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(folder, KIT_NAME)
        write_file(output, packed.read_bytes())
    return output


def _pair(folder: Path, models: Path, progress: Progress) -> None:
    target = _save(models / "tiny", **TINY)
    draft = _save(models / "noisy", noise=0.02, **TINY)
    pair: dict[str, Any] = {"draft": str(draft), "context": CONTEXT, "chunk": CHUNK}
    for name, backend, version in (
        (STANDARD, RTX, None),
        (STANDARD_22, "tensorrt", oldest_version(STANDARD_22_DIALECT)),
        (ONNXRUNTIME, "onnxruntime", None),
    ):
        progress.step(f"{name}: exporting")
        _export(target, folder / name, backend, tensorrt_version=version, **pair)
    if _has_rtx():
        build(folder / STANDARD, RTX, progress=progress)


def _has_rtx() -> bool:
    return importlib.util.find_spec("tensorrt_rtx") is not None


def _attention(folder: Path, models: Path, progress: Progress) -> None:
    """Each context as exported, and in the other forms; each with the target's engine alone."""
    for context in CONTEXTS:
        progress.step(f"attention over {context}: exporting")
        source = _save(models / f"attention-{context}", max_position_embeddings=context, **ONE_LAYER)
        exported = models / f"exported-{context}"
        _export(source, exported, RTX, context=context, chunk=64, k=5)
        for form, name in KIT_FORMS.items():
            bundle = Path(shutil.copytree(exported, folder / ATTENTION / f"{form}-{context}"))
            if form != AS_EXPORTED:
                rewrite_attention(bundle / manifest_from_bundle(bundle).target.graph, FORMS[name])
                _restamp(bundle)
            if _has_rtx():
                progress.step(f"{form} over {context}: building")
                build(bundle, RTX, has_decode_profile=True, is_target_alone=True)


def _layers(folder: Path, models: Path, progress: Progress) -> None:
    """Exported whole, and stored without the weights, whose place seeded ones take."""
    progress.step("layers of a 1.5B: exporting")
    source = _save(models / LAYERS, **TWO_OF_1_5B)
    bundle = folder / LAYERS
    _export(source, bundle, RTX, context=2048, chunk=64, k=7)
    weights = bundle / manifest_from_bundle(bundle).target.weights[0]
    write_seeded(weights, weights.stat().st_size)
    _restamp(bundle)
    weights.unlink()


def _restamp(bundle: Path) -> None:
    """Write the manifest again for files that were changed."""
    manifest = manifest_from_bundle(bundle)
    paths = {name: bundle / name for name in manifest.files}
    files = {name: FileEntry(path.stat().st_size, sha256_of(path)) for name, path in paths.items()}
    write_text_file(bundle / MANIFEST_NAME, manifest_text(replace(manifest, files=files)))


def _export(
    target: Path,
    bundle: Path,
    backend: str,
    *,
    context: int,
    chunk: int,
    draft: str = "ngram",
    k: int = K,
    tensorrt_version: str | None = None,
) -> None:
    from specrt.exporter.export import export
    from specrt.exporter.options import ExportOptions

    bundle.parent.mkdir(parents=True, exist_ok=True)
    export(
        ExportOptions(
            str(target),
            bundle,
            draft,
            k,
            max_seq_len=context,
            prefill_chunk=chunk,
            dtype="fp16",
            backend=backend,
            tensorrt_version=tensorrt_version,
        )
    )


def _tokenizer() -> Any:
    """A byte-level BPE tokenizer of 320 ids that encodes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _save(folder: Path, noise: float = 0.0, **config: Any) -> Path:
    """A Llama with random weights, ``noise`` of their spread added to make a draft that is often right."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = _tokenizer()
    range_ = 0.3 if config["hidden_size"] < 1024 else 0.02  # of small models, so that the argmax is not a near tie
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    model = models.from_config(LlamaConfig(**{"initializer_range": range_, **ids, **config}))
    if noise:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weights in model.parameters():
                weights.add_(noise * weights.std() * torch.randn(weights.shape, generator=generator))
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    from specrt.tools.terminal.progress import shown_progress

    with shown_progress() as shown:
        made = make_kit(Path(sys.argv[1] if len(sys.argv) > 1 else KIT_FILE), shown)
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")
