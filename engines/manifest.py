"""``bundle.json``: the description of a bundle. Read and written only here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrt.engines.codec import from_json, to_json
from specrt.engines.contract import ModelSpec, TensorSpec, model_contract
from specrt.engines.dialects import fits
from specrt.engines.errors import BundleError
from specrt.engines.experts import Experts
from specrt.engines.samplers import SAMPLER_NAMES

SCHEMA_VERSION = 7
MANIFEST_NAME = "bundle.json"
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DRAFT_KINDS = ("ngram", "self", "model")
# Largest difference to the torch model over the largest |logit|. fp32: kernels sum in another order; fp16 rounds every
# activation.
LOGITS_TOLERANCE = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Parity:
    """Comparison of the exported graph with the torch model at export, on the reference ids.

    Units: logits. ``max_abs_error`` over ``num_positions`` positions of ``vocab_size`` logits each;
    ``argmax_agreement`` is the share of positions whose most likely token is the same, ``mean_kl`` the mean of
    KL(torch || graph) in nats.
    """

    num_positions: int
    max_abs_error: float
    max_abs_logit: float
    argmax_agreement: float
    mean_kl: float = 0.0


@dataclass(frozen=True)
class AdapterEntry:
    """A LoRA adapter that was merged into a model's weights, and the SHA-256 of its file."""

    source: str
    revision: str | None
    sha256: str


@dataclass(frozen=True)
class ModelEntry:
    """A model of the bundle. ``reference`` holds ids and fp32 logits of the torch model for checks without torch.

    ``bytes_per_pass`` is the size of the weights that a pass of one token reads. Tables of which it looks up single
    rows do not count, nor experts that the token does not use. ``experts`` gives what a pass of more tokens reads; None
    if that is the same. ``samplers`` maps each sampler's name to its graph. ``quantization`` of the weights is
    ``none``, ``int8``, ``w8a8`` or ``int4``. ``adapter`` is what was merged into ``source``. ``fingerprint`` is one
    SHA-256 over the tensors of ``source``'s files, as stored, with which every tensor of the torch model was compared;
    a draft made of the target's weights has the target's.
    """

    source: str
    revision: str | None
    fingerprint: str
    architecture: str
    graph: str
    spec: ModelSpec
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    weights_bytes: int
    bytes_per_pass: int
    reference: str
    parity: Parity
    samplers: dict[str, str]
    quantization: str = "none"
    adapter: AdapterEntry | None = None
    experts: Experts | None = None

    @property
    def weights(self) -> tuple[str, ...]:
        """The files that may hold its weights. A draft in the target's folder reads the target's file."""
        return (f"{self.graph.rpartition('/')[0]}/model.onnx.data", f"{self.graph}.data")

    @property
    def further_reads(self) -> Callable[[int], float] | None:
        """By tokens of a pass: its extra reads over a pass of one token, as a share of the latter; None if none."""
        experts = self.experts
        return None if experts is None else lambda num_tokens: experts.further_bytes(num_tokens) / self.bytes_per_pass

    @property
    def logits_tolerance(self) -> float:
        """Tolerance for logits relative to the torch model's largest |logit|: rounding, or as measured at export."""
        if self.quantization == "none":
            return LOGITS_TOLERANCE[self.spec.dtype]
        return 1.5 * self.parity.max_abs_error / self.parity.max_abs_logit


@dataclass(frozen=True)
class DraftEntry:
    """``kind`` is one of ``ngram``, ``self`` (the target on a second slot) and ``model`` (then ``model`` is set).

    ``shares_kv``: the draft is the target with other weights and reads the target's KV. A model whose spec
    ``reads_features`` is an EAGLE-3 head.
    """

    kind: str
    model: ModelEntry | None
    shares_kv: bool = False


@dataclass(frozen=True)
class TokenizerEntry:
    """``file``, ``chat_template`` (the default one) and ``named_chat_templates`` (others, by name) are files.

    ``special_tokens`` are the strings that templates may use, by names such as ``bos_token``. With ``clean_up_spaces``
    the text is cleaned as transformers does for WordPiece tokenizers.
    """

    file: str
    chat_template: str | None
    special_tokens: dict[str, str]
    named_chat_templates: dict[str, str]
    clean_up_spaces: bool

    @property
    def templates(self) -> dict[str, str]:
        """The files of all chat templates by name."""
        default = {} if self.chat_template is None else {"default": self.chat_template}
        return {**self.named_chat_templates, **default}


@dataclass(frozen=True)
class FileEntry:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of ``bundle.json``; ``files`` lists every other file that the export wrote.

    Engines built from the bundle are next to them, with separate records (``specrt.engines.trt.record``).
    ``generation_defaults`` are the sampling settings of the model's generation config, by specrt's names.
    """

    schema_version: int
    specrt_version: str
    created_utc: str
    versions: dict[str, str]
    backends: tuple[str, ...]
    num_speculative_tokens: int
    eos_token_ids: tuple[int, ...]
    target: ModelEntry
    draft: DraftEntry
    generation_defaults: dict[str, float]
    tokenizer: TokenizerEntry
    files: dict[str, FileEntry]


def manifest_text(manifest: Manifest) -> str:
    """The content of ``bundle.json``."""
    return json.dumps(to_json(manifest), indent=1) + "\n"


def manifest_from_bundle(bundle: Path) -> Manifest:
    """Read and validate ``bundle.json``. Raises ``BundleError`` with what is wrong and how to fix it."""
    path = bundle / MANIFEST_NAME
    if not bundle.is_dir():
        raise BundleError(f"{bundle}: no such bundle folder; make one with 'specrt export TARGET -o {bundle}'")
    if not path.is_file():
        raise BundleError(f"{bundle}: not a bundle, {MANIFEST_NAME} is missing; export again with 'specrt export'")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise BundleError(f"{path}: not readable as JSON ({error}); export the bundle again") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path}: schema version {version!r}, this specrt reads {SCHEMA_VERSION}; export again, "
            "or install the specrt that wrote it"
        )
    try:
        manifest = from_json(Manifest, data)
        _validate(manifest)
    except ValueError as error:
        raise BundleError(f"{path}: {error}; export the bundle again") from error
    return manifest


def _validate_model(manifest: Manifest, model: ModelEntry) -> None:
    if not all(fits(name, model.spec.dialect) for name in manifest.backends):
        raise ValueError(f"{model.graph}: dialect {model.spec.dialect!r} does not fit {', '.join(manifest.backends)}")
    contract = model_contract(model.spec)
    if (model.inputs, model.outputs) != (contract.inputs, contract.outputs):
        raise ValueError(f"{model.graph}: its inputs and outputs are not those that its spec implies")
    if manifest.draft.shares_kv and contract.swaps:
        raise ValueError(f"{model.graph}: dialect {model.spec.dialect!r} has no cache that a draft can share")
    if missing := sorted(set(SAMPLER_NAMES) - set(model.samplers)):
        raise ValueError(f"{model.graph}: its sampler {missing[0]!r} is missing")


def _validate_head(target: ModelSpec, head: ModelSpec) -> None:
    """A head's cache begins with what its target writes."""
    sizes = [(spec.feature_size, spec.dtype, spec.max_width, spec.capacity) for spec in (target, head)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft: its features, dtype, width and capacity are {sizes[1]}, and those of its target {sizes[0]}"
        )


def _validate(manifest: Manifest) -> None:
    if manifest.draft.kind not in DRAFT_KINDS or (manifest.draft.kind == "model") != (manifest.draft.model is not None):
        raise ValueError(f"draft: kind {manifest.draft.kind!r} and its model do not go together")
    if manifest.num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens: got {manifest.num_speculative_tokens}, expected 1 or more")
    for name, value in manifest.generation_defaults.items():
        if name not in GENERATION_DEFAULTS or not math.isfinite(value):
            raise ValueError(f"generation_defaults: {name} {value!r} is not one of {', '.join(GENERATION_DEFAULTS)}")
    models = [model for model in (manifest.target, manifest.draft.model) if model is not None]
    for model in models:
        _validate_model(manifest, model)
        if model.spec.reads_features:
            _validate_head(manifest.target.spec, model.spec)
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"files: {name!r} leads out of the bundle")
    named = {manifest.tokenizer.file, *manifest.tokenizer.templates.values()}
    named.update(*((model.graph, model.reference, *model.samplers.values()) for model in models))
    if unlisted := sorted(named - set(manifest.files)):
        raise ValueError(f"files: {unlisted[0]!r} is named by the bundle but not listed")
