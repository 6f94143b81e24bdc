"""Bundles on the backend ``fake``: whole runtimes without a model. The fixtures are in conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specrt.engines.contract import ROWS, Contract, ModelSpec, model_contract
from specrt.engines.fake import FakeSampler, NextToken, fake_spec
from specrt.engines.interface import CPU
from specrt.engines.interface import Backend as AnyBackend
from specrt.engines.interface import Engine as AnyEngine
from specrt.engines.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    DraftEntry,
    FileEntry,
    Manifest,
    ModelEntry,
    Parity,
    TokenizerEntry,
    manifest_text,
)
from specrt.engines.samplers import SAMPLER_NAMES, sampler_contract
from specrt.engines.storage.integrity import sha256_of
from specrt.runtime.result import Result
from specrt.runtime.runtime import Runtime
from tests.runtime.support.fakes import Engine
from tests.runtime.support.tables import hashed, hashed_logits, noisy

VOCAB_SIZE, K, CONTEXT, DRAFT_CONTEXT = 64, 4, 48, 40
PROMPT = [3, 1, 4, 1, 5]

target_table = hashed(0, VOCAB_SIZE)
TABLE = hashed_logits(1, VOCAB_SIZE)
DRAFT = noisy(TABLE, 2, VOCAB_SIZE, 0.125)

# Options that give a function of the prompt, by each rule and with each kind of state that a slot may keep
_WAYS: list[dict[str, Any]] = [
    {},
    {"reproducible": True},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 3, "rule": "block"},
    {"temperature": 1.0, "seed": 3, "rule": "block", "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5},
    {"frequency_penalty": 0.5, "logprobs": 1},
    {"temperature": 1.0, "seed": 3, "rule": "block", "top_p": 0.9, "repetition_penalty": 1.5},
    {"temperature": 0.7, "seed": 4, "top_k": 9, "presence_penalty": 0.5, "draft": "ngram"},
    {"draft": "none", "banned_token_ids": [1, 2, 3], "logits_processors": [lambda prefix, logits: logits[::-1]]},
]
# Without a K it would be chosen by times, and figures could not be compared.
WAYS = [way if way.get("draft") == "none" else {**way, "num_speculative_tokens": K} for way in _WAYS]


@dataclass
class FailingTable:
    """The draft's table: the target's, except for every third prefix; raises in the pass of number ``fails_at``."""

    fails_at: int | None = None
    num_calls: int = 0

    def __call__(self, prefix: Sequence[int]) -> int:
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise OSError("the draft is gone")
        token = target_table(prefix)
        return token if len(prefix) % 3 else token ^ 1


@dataclass
class Backend:
    """The backend ``fake``; ``open`` is its row in the table. It keeps the models' engines that it loads."""

    target: NextToken = target_table
    draft: NextToken = field(default_factory=FailingTable)
    k: int = K
    contexts: dict[str, int] = field(default_factory=lambda: {"target": CONTEXT, "draft": DRAFT_CONTEXT})
    vocab_sizes: dict[str, int] = field(default_factory=lambda: {"target": VOCAB_SIZE, "draft": VOCAB_SIZE})
    engines: dict[str, Engine] = field(default_factory=dict)
    name: str = "fake"
    device: str = CPU
    cache_path: Path | None = None

    def save_cache(self) -> None:
        pass

    def spec(self, role: str) -> ModelSpec:
        return fake_spec(self.vocab_sizes[role], self.contexts[role], self.k, max_width=8)

    def open(self, name: str, bundle: Path, threads: int | None) -> AnyBackend:
        """Itself, for any bundle."""
        return self

    def load(self, graph: str, contract: Contract, threads: int | None = None) -> AnyEngine:
        role, *rest = graph.split("/")
        if rest[0] == "samplers":
            return self._sampler(role, rest[1], contract, threads)
        assert contract == model_contract(self.spec(role))
        self.engines[role] = Engine(self.spec(role), self.target if role == "target" else self.draft)
        return self.engines[role]

    def _sampler(self, role: str, name: str, contract: Contract, threads: int | None) -> AnyEngine:
        """Samplers run on one thread; those of a draft verify one row, and all give the target's probabilities."""
        spec = replace(self.spec(role), max_rows=contract.limits[ROWS])
        assert threads == 1
        assert spec.max_rows == 1 or (role, spec) == ("target", self.spec("target"))
        assert contract == sampler_contract(name, spec, self.vocab_sizes["target"])
        return FakeSampler(spec, name, self.vocab_sizes["target"])


def _entry(role: str, spec: ModelSpec) -> ModelEntry:
    contract = model_contract(spec)
    return ModelEntry(
        source=role,
        revision=None,
        fingerprint="",
        architecture="Fake",
        graph=f"{role}/model",
        spec=spec,
        inputs=contract.inputs,
        outputs=contract.outputs,
        weights_bytes=0,
        bytes_per_pass=0,
        reference=f"{role}/reference",
        parity=Parity(1, 0.0, 1.0, 1.0),
        samplers={name: f"{role}/samplers/{name}" for name in SAMPLER_NAMES},
    )


def manifest_of(
    backend: Backend,
    draft: str = "model",
    eos: Sequence[int] = (),
    files: Mapping[str, FileEntry] | None = None,
    **generation_defaults: float,
) -> Manifest:
    return Manifest(
        schema_version=SCHEMA_VERSION,
        specrt_version="0",
        created_utc="",
        versions={},
        backends=("fake",),
        num_speculative_tokens=backend.k,
        eos_token_ids=tuple(eos),
        target=_entry("target", backend.spec("target")),
        draft=DraftEntry(draft, _entry("draft", backend.spec("draft")) if draft == "model" else None),
        generation_defaults=generation_defaults,
        tokenizer=TokenizerEntry("tokenizer.json", None, {}, {}, False),
        files=dict(files or {}),
    )


def write_bundle(
    folder: Path,
    draft: str,
    eos: Sequence[int],
    ending: str = "",
    backend: Backend | None = None,
    **generation_defaults: float,
) -> Path:
    """A bundle whose token ``i`` is the word ``wi``; with an ``ending``, the words are spelled in bytes and end so."""
    backend = backend or Backend()
    names = ["tokenizer.json"]
    for role in ("target", "draft"):
        names += [f"{role}/model", f"{role}/reference", *(f"{role}/samplers/{name}" for name in SAMPLER_NAMES)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    words = {f"w{index}{ending}": index for index in range(backend.vocab_sizes["target"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"w0{ending}"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if ending:
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {name: FileEntry((folder / name).stat().st_size, sha256_of(folder / name)) for name in names}
    manifest = manifest_of(backend, draft, eos, files, **generation_defaults)
    (folder / MANIFEST_NAME).write_text(manifest_text(manifest), encoding="utf-8")
    return folder


# ``open_bundle(draft="model", eos=(), ending="", **generation_defaults)``: a new bundle, opened
Open = Callable[..., Runtime]


def num_slots(backend: Backend) -> list[int]:
    return [engine.num_open for engine in backend.engines.values()]


def alone(open_bundle: Open, prompt: Sequence[int], **options: Any) -> tuple[list[int], list[int]]:
    """(ids, acceptance histogram) in a separate runtime."""
    return shown(open_bundle().generate(prompt, **options))


def shown(result: Result) -> tuple[list[int], list[int]]:
    return result.token_ids, result.stats.acceptance_histogram
