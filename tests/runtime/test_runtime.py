"""The open bundle on the fake backend: speculation changes no answer, and what is interrupted leaves nothing behind."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specrt.engines import load as backends
from specrt.engines.errors import BackendError, BundleError, UsageError
from specrt.engines.fake import FakeEngine, FakeHead, fake_spec
from specrt.engines.integrity import sha256_of
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
from specrt.engines.seam import Engine
from specrt.engines.spec import Contract, match_head_contract, model_contract
from specrt.runtime.runtime import Runtime, load

VOCAB_SIZE, K, CONTEXT, DRAFT_CONTEXT = 64, 4, 48, 40
SPECS = {
    "target": fake_spec(VOCAB_SIZE, CONTEXT, K, max_width=8),
    "draft": fake_spec(VOCAB_SIZE, DRAFT_CONTEXT, K, max_width=8),
}
PROMPT = [3, 1, 4, 1, 5]


def target_table(prefix: Sequence[int]) -> int:
    """A hash of the whole prefix."""
    digest = hashlib.blake2b(array("q", prefix).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest) % VOCAB_SIZE


def plain(prompt: Sequence[int], count: int) -> list[int]:
    """PLAIN: the ``count`` tokens after ``prompt``."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(target_table(tokens))
    return tokens[len(prompt) :]


@dataclass
class Draft:
    """The draft's table: the target's, but for every third prefix; raises in the pass of number ``fails_at``."""

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
    """The backend ``fake``: a row of the table of backends, which keeps the engines that it loads."""

    draft: Draft = field(default_factory=Draft)
    engines: dict[str, FakeEngine] = field(default_factory=dict)

    def __call__(self, graph: Path, contract: Contract, threads: int | None) -> Engine:
        role = graph.parent.name
        if role == "heads":
            return FakeHead(next(spec for spec in SPECS.values() if match_head_contract(spec) == contract))
        assert contract == model_contract(SPECS[role])
        self.engines[role] = FakeEngine(SPECS[role], target_table if role == "target" else self.draft)
        return self.engines[role]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Backend:
    monkeypatch.setenv("SPECRT_CACHE", str(tmp_path / "cache"))
    backend = Backend()
    monkeypatch.setitem(backends._LOADERS, "fake", backend)
    return backend


def entry(role: str) -> ModelEntry:
    contract = model_contract(SPECS[role])
    return ModelEntry(
        source=role,
        revision=None,
        architecture="Fake",
        graph=f"{role}/model",
        spec=SPECS[role],
        inputs=contract.inputs,
        outputs=contract.outputs,
        weights_bytes=0,
        bytes_per_pass=0,
        reference=f"{role}/reference",
        parity=Parity(1, 0.0, 1.0, 1.0),
    )


def write_bundle(folder: Path, draft: str, eos: Sequence[int], ending: str = "") -> Path:
    """A bundle whose token ``i`` is the word ``wi``; with an ``ending``, the words are spelled in bytes and end so."""
    names = ["target/model", "target/reference", "draft/model", "draft/reference", "heads/match", "tokenizer.json"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    words = {f"w{index}{ending}": index for index in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"w0{ending}"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if ending:
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        specrt_version="0",
        created_utc="",
        versions={},
        backends=("fake",),
        num_speculative_tokens=K,
        eos_token_ids=tuple(eos),
        target=entry("target"),
        draft=DraftEntry(draft, entry("draft") if draft == "model" else None),
        heads={"match": "heads/match"},
        tokenizer=TokenizerEntry("tokenizer.json", None, None, None),
        files={name: FileEntry((folder / name).stat().st_size, sha256_of(folder / name)) for name in names},
    )
    (folder / MANIFEST_NAME).write_text(manifest_text(manifest), encoding="utf-8")
    return folder


Open = Callable[..., Runtime]


@pytest.fixture
def open_bundle(tmp_path: Path, backend: Backend) -> Iterator[Open]:
    """``open_bundle(draft="model", eos=(), ending="")``: a new bundle, opened and closed at the end."""
    opened: list[Runtime] = []

    def make(draft: str = "model", eos: Sequence[int] = (), ending: str = "") -> Runtime:
        opened.append(load(write_bundle(tmp_path / str(len(opened)), draft, eos, ending)))
        return opened[-1]

    yield make
    for runtime in opened:
        runtime.close()


# --- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bundled", ["ngram", "self", "model"])
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, None])
def test_every_draft_and_k_gives_the_same_answer(open_bundle: Open, bundled: str, k: int | None) -> None:
    runtime = open_bundle(bundled)
    kinds = ["ngram", "none", None] + ["model"] * (bundled != "ngram")
    for draft in kinds:
        result = runtime.generate(PROMPT, max_new_tokens=30, num_speculative_tokens=k, draft=draft)
        assert result.token_ids == plain(PROMPT, 30)
        assert (result.finish_reason, result.stats.completion_tokens) == ("length", 30)


@pytest.mark.parametrize(("bundled", "rate"), [("self", 1.0), ("ngram", None)])
def test_the_bundle_s_own_draft_is_the_default(open_bundle: Open, bundled: str, rate: float | None) -> None:
    """The hash of the whole prefix never repeats an n-gram here, so n-gram lookup finds nothing to draft."""
    assert open_bundle(bundled).generate(PROMPT, max_new_tokens=30).stats.draft_acceptance_rate == rate


@pytest.mark.parametrize(("k", "draft"), [(0, None), (0, "model"), (None, "none"), (3, "none")])
def test_no_speculation_asks_no_draft(open_bundle: Open, backend: Backend, k: int | None, draft: str | None) -> None:
    stats = open_bundle().generate(PROMPT, max_new_tokens=9, num_speculative_tokens=k, draft=draft).stats
    assert backend.engines["draft"].num_passes == 0
    assert (stats.rounds, stats.drafted) == (8, 0)


def test_k_is_the_bundle_s_or_what_is_asked_for(open_bundle: Open) -> None:
    runtime = open_bundle("self")
    assert runtime.generate(PROMPT, max_new_tokens=21).stats.acceptance_histogram == [0, 0, 0, 0, 4]
    stats = runtime.generate(PROMPT, max_new_tokens=21, num_speculative_tokens=1).stats
    assert stats.acceptance_histogram == [0, 10]


def test_a_prompt_may_be_text(open_bundle: Open) -> None:
    result = open_bundle().generate("w3 w1 w4 w1 w5", max_new_tokens=6)
    assert result.token_ids == plain(PROMPT, 6)
    assert result.text == " ".join(f"w{token}" for token in plain(PROMPT, 6))
    assert result.stats.prompt_tokens == 5


@pytest.mark.parametrize("place", range(12))
def test_an_eos_of_the_bundle_stops_unless_ignored(open_bundle: Open, place: int) -> None:
    expected = plain(PROMPT, 20)
    eos = expected[place]
    cut = expected.index(eos) + 1
    runtime = open_bundle(eos=[eos])
    result = runtime.generate(PROMPT, max_new_tokens=20)
    assert (result.token_ids, result.finish_reason) == (expected[:cut], "stop")
    result = runtime.generate(PROMPT, max_new_tokens=20, ignore_eos=True)
    assert (result.token_ids, result.finish_reason) == (expected, "length")


@pytest.mark.parametrize("length", [1, DRAFT_CONTEXT - 1, DRAFT_CONTEXT, DRAFT_CONTEXT + 1, CONTEXT - 2, CONTEXT - 1])
def test_the_context_is_filled_to_its_end(open_bundle: Open, length: int) -> None:
    result = open_bundle().generate([7] * length, max_new_tokens=99)
    assert result.token_ids == plain([7] * length, CONTEXT - length)
    assert result.finish_reason == "length"


def test_no_new_tokens_is_an_empty_answer(open_bundle: Open, backend: Backend) -> None:
    result = open_bundle().generate(PROMPT, max_new_tokens=0)
    assert (result.token_ids, result.text, result.finish_reason) == ([], "", "length")
    assert (result.stats.prompt_tokens, result.stats.rounds) == (5, 0)
    assert backend.engines["target"].num_passes == 0


def test_a_stream_s_pieces_are_the_text_and_its_ids_grow_with_them(open_bundle: Open) -> None:
    stream = open_bundle().stream(PROMPT, max_new_tokens=20)
    pieces = []
    with pytest.raises(RuntimeError, match="the stream has not ended"):
        _ = stream.result
    for piece in stream:
        pieces.append(piece)
        assert "".join(pieces) == " ".join(f"w{token}" for token in stream.token_ids)
    assert len(pieces) > 5
    assert stream.result.text == "".join(pieces)
    assert stream.result.token_ids == stream.token_ids == plain(PROMPT, 20)
    assert stream.result.stats.total_ms >= stream.result.stats.verify_ms > 0


def test_what_the_text_holds_back_comes_at_the_end(open_bundle: Open) -> None:
    """Each token ends with the first of two bytes of a character, here spelled as the byte-level alphabet does."""
    stream = open_bundle(ending="\u00c3").stream(PROMPT, max_new_tokens=3)
    first, second, third = (f"w{token}" for token in plain(PROMPT, 3))
    pieces = list(stream)
    assert pieces[0] == first
    assert pieces[-1] == "\N{REPLACEMENT CHARACTER}"
    assert stream.result.text == "".join(pieces) == "\N{REPLACEMENT CHARACTER}".join([first, second, third, ""])


# --- one sequence after and beside another -------------------------------------------------------------------------


def num_slots(backend: Backend) -> list[int]:
    return [len(engine.open_slots) for engine in backend.engines.values()]


@pytest.mark.parametrize("fails_at", range(1, 12))
def test_a_draft_that_raises_leaves_a_runtime_that_answers(open_bundle: Open, backend: Backend, fails_at: int) -> None:
    """In its prefill, or at its first or a later token of a round, when the target's cache holds another prompt."""
    runtime = open_bundle()
    backend.draft.fails_at = fails_at
    with pytest.raises(OSError, match="the draft is gone"):
        runtime.generate([9] * 11, max_new_tokens=20)
    for _ in range(2):
        assert runtime.generate(PROMPT, max_new_tokens=20).token_ids == plain(PROMPT, 20)
    assert num_slots(backend) == [1, 1]


def test_a_draft_without_memory_costs_the_target_no_slot(
    open_bundle: Open, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_bundle()

    def refuse(*_: object) -> NoReturn:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(backend.engines["draft"], "open", refuse)
        for _ in range(3):
            with pytest.raises(MemoryError):
                runtime.generate(PROMPT, max_new_tokens=20)
    assert num_slots(backend) == [1, 0]
    assert runtime.generate(PROMPT, max_new_tokens=20).token_ids == plain(PROMPT, 20)


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 5])
def test_a_stream_that_is_closed_gives_its_slots_back(open_bundle: Open, backend: Backend, num_pieces: int) -> None:
    runtime = open_bundle()
    stream = runtime.stream([9] * 11, max_new_tokens=20)
    pieces = iter(stream)
    for _ in range(num_pieces):
        next(pieces)
    stream.close()
    assert list(stream) == []
    with pytest.raises(RuntimeError, match="the stream has not ended"):
        _ = stream.result
    result = runtime.generate(PROMPT, max_new_tokens=20)
    assert result.token_ids == plain(PROMPT, 20)
    assert num_slots(backend) == [1, 1]


@pytest.mark.parametrize(("bundled", "slots"), [("self", [2 * 3]), ("model", [3, 3])])
def test_streams_beside_each_other_answer_as_alone(
    open_bundle: Open, backend: Backend, bundled: str, slots: list[int]
) -> None:
    runtime = open_bundle(bundled)
    prompts = [PROMPT, [2, 7, 1, 8], [9] * 20]
    streams = [runtime.stream(prompt, max_new_tokens=20) for prompt in prompts]
    waiting = [iter(stream) for stream in streams]
    while waiting:
        waiting = [pieces for pieces in waiting if next(pieces, None) is not None]
    assert [stream.result.token_ids for stream in streams] == [plain(prompt, 20) for prompt in prompts]
    assert num_slots(backend) == slots
    runtime.generate(PROMPT, max_new_tokens=3)
    assert num_slots(backend) == slots


def test_the_same_request_gives_the_same_figures_after_others(open_bundle: Open) -> None:
    runtime = open_bundle()

    def figures() -> list[int]:
        return runtime.generate(PROMPT, max_new_tokens=30).stats.acceptance_histogram

    first = figures()
    runtime.generate([9] * 30, max_new_tokens=7)
    assert figures() == first


def test_closing_gives_every_slot_back(open_bundle: Open, backend: Backend) -> None:
    with open_bundle() as runtime:
        runtime.generate(PROMPT, max_new_tokens=3)
        assert num_slots(backend) == [1, 1]
    assert num_slots(backend) == [0, 0]


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: got -1, expected 0 or more"),
        ({"num_speculative_tokens": 5}, "num_speculative_tokens: got 5, this bundle was exported for 0 to 4"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: got -1"),
        ({"draft": "oracle"}, "draft: got 'oracle', expected ngram, model, none"),
        ({"draft": "model"}, "draft: got 'model', but this bundle has none"),
        ({"prompt": [1] * CONTEXT}, "prompt: 48 tokens, the bundle's context is 48"),
        ({"prompt": []}, "prompt: got no tokens"),
        ({"prompt": [VOCAB_SIZE]}, "prompt: token 0 is 64"),
    ],
)
def test_options_that_are_refused_before_anything_runs(
    open_bundle: Open, backend: Backend, options: dict[str, Any], message: str
) -> None:
    runtime = open_bundle("ngram")
    with pytest.raises(UsageError) as caught:
        runtime.stream(**{"prompt": PROMPT, **options})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1
    assert num_slots(backend) == [0]


def test_no_threads_are_refused(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(UsageError, match="threads: got 0, expected 1 or more"):
        load(write_bundle(tmp_path / "bundle", "ngram", ()), threads=0)


def test_a_backend_the_bundle_does_not_list_is_refused(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(BackendError, match="backend onnxruntime: this bundle was exported for fake"):
        load(write_bundle(tmp_path / "bundle", "ngram", ()), backend="onnxruntime")


def test_a_backend_this_specrt_does_not_have_is_refused(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(backends._LOADERS, "fake")
    with pytest.raises(BackendError, match="backend fake: this specrt has onnxruntime"):
        load(write_bundle(tmp_path / "bundle", "ngram", ()))


def test_a_file_that_was_changed_is_refused(tmp_path: Path, backend: Backend) -> None:
    bundle = write_bundle(tmp_path / "bundle", "ngram", ())
    (bundle / "heads" / "match").write_text("heads/matcH")
    with pytest.raises(BundleError, match="SHA-256 is"):
        load(bundle)
