"""The open bundle: engines with their weights, a pool of sequences, and ``generate`` and ``stream`` on top."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from specrt.engines.errors import UsageError
from specrt.engines.integrity import check_files
from specrt.engines.load import choose_backend, load_engine
from specrt.engines.manifest import Manifest, ModelEntry, manifest_from_bundle
from specrt.engines.seam import Engine
from specrt.engines.spec import match_head_contract, model_contract
from specrt.runtime.cached import CachedModel
from specrt.runtime.drafters import Drafter, ModelDrafter, NGramDrafter
from specrt.runtime.result import Result, Stats
from specrt.runtime.round import Limits, generate_tokens
from specrt.runtime.text import Prompt, TextCodec

DRAFTS = ("ngram", "model", "none")
DEFAULT_MAX_NEW_TOKENS = 256


def load(bundle: str | Path, backend: str | None = None, threads: int | None = None) -> Runtime:
    """Open a bundle for generation.

    ``threads`` defaults to the cores this process may use. Raises ``BundleError`` for a damaged bundle and
    ``BackendError`` for a backend that is not in it or whose library is missing.
    """
    return Runtime(Path(bundle), backend, threads)


class _Model:
    """A model of the bundle: its engine, its head, and the slots not in use."""

    def __init__(self, entry: ModelEntry, head_graph: Path, bundle: Path, backend: str, threads: int | None) -> None:
        self.spec = entry.spec
        self._engine: Engine = load_engine(backend, bundle / entry.graph, model_contract(entry.spec), threads)
        self._head: Engine = load_engine(backend, head_graph, match_head_contract(entry.spec), 1)
        self._idle: list[CachedModel] = []
        self._num_slots = 0
        self._lock = threading.Lock()

    def take(self) -> CachedModel:
        """An empty cache: one given back earlier, or a new slot."""
        with self._lock:
            if self._idle:
                model = self._idle.pop()
            else:
                model = CachedModel(self._engine, self._head, self._num_slots, self.spec)
                self._num_slots += 1
        model.rollback(0)
        return model

    def give_back(self, model: CachedModel) -> None:
        with self._lock:
            self._idle.append(model)

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().close()


class Runtime:
    """A bundle that is open. Weights are loaded once; each generation takes KV buffers of its own from a pool.

    ``generate`` and ``stream`` may be called from several threads.
    """

    def __init__(self, bundle: Path, backend: str | None = None, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"threads: got {threads}, expected 1 or more")
        self.manifest: Manifest = manifest_from_bundle(bundle)
        self.backend = choose_backend(self.manifest, backend)
        check_files(bundle, self.manifest)
        target = self.manifest.target
        self.codec = TextCodec.from_bundle(bundle, self.manifest.tokenizer, target.spec.vocab_size)
        self._bundle, self._threads = bundle, threads
        self._target = self._load(target)
        self._draft = self._load_draft()

    def _load(self, entry: ModelEntry) -> _Model:
        head = self._bundle / self.manifest.heads["match"]
        return _Model(entry, head, self._bundle, self.backend, self._threads)

    def _load_draft(self) -> _Model | None:
        entry = self.manifest.draft
        if entry.kind == "self":
            return self._target
        return self._load(entry.model) if entry.model is not None else None

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        num_speculative_tokens: int | None = None,
        draft: str | None = None,
        ignore_eos: bool = False,
    ) -> Stream:
        """Generate greedily, piece by piece of text; ``Stream.result`` is there at the end.

        ``prompt`` is a text, a list of chat messages or a list of token ids. ``num_speculative_tokens`` 0 means plain
        decoding, None the bundle's K; ``draft`` None means the bundle's own. Raises ``UsageError``.
        """
        k = self._checked_k(num_speculative_tokens)
        kind = self._checked_draft(draft)
        if max_new_tokens < 0:
            raise UsageError(f"max_new_tokens: got {max_new_tokens}, expected 0 or more")
        ids = self.codec.encode(prompt)
        max_seq_len = self.manifest.target.spec.max_seq_len
        if len(ids) >= max_seq_len:
            raise UsageError(
                f"prompt: {len(ids)} tokens, the bundle's context is {max_seq_len} and the answer needs one at least; "
                "shorten it, or export with a larger --max-seq-len"
            )
        eos = frozenset() if ignore_eos else frozenset(self.manifest.eos_token_ids)
        return Stream(self, ids, Limits(eos, max_new_tokens, max_seq_len, k), kind if k else "none")

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        num_speculative_tokens: int | None = None,
        draft: str | None = None,
        ignore_eos: bool = False,
    ) -> Result:
        """``stream`` to its end; see there."""
        stream = self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=num_speculative_tokens,
            draft=draft,
            ignore_eos=ignore_eos,
        )
        for _ in stream:
            pass
        return stream.result

    def close(self) -> None:
        """Free the KV buffers that are not in use. Weights go with the object."""
        for model in {id(m): m for m in (self._target, self._draft) if m is not None}.values():
            model.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked_k(self, wanted: int | None) -> int:
        built = self.manifest.num_speculative_tokens
        if wanted is None:
            return built
        if not 0 <= wanted <= built:
            raise UsageError(
                f"num_speculative_tokens: got {wanted}, this bundle was exported for 0 to {built}; "
                f"export again with --num-speculative-tokens {wanted}"
            )
        return wanted

    def _checked_draft(self, wanted: str | None) -> str:
        if wanted is None:
            return "model" if self._draft is not None else "ngram"
        if wanted not in DRAFTS:
            raise UsageError(f"draft: got {wanted!r}, expected {', '.join(DRAFTS)}")
        if wanted == "model" and self._draft is None:
            raise UsageError(
                "draft: got 'model', but this bundle has none; export again with --draft MODEL or --draft self"
            )
        return wanted

    def _tokens(self, tokens: list[int], limits: Limits, draft: str, stats: Stats) -> Iterator[list[int]]:
        """``generate_tokens`` on caches from the pool, which go back however it ends."""
        with ExitStack() as taken:
            target = self._target.take()
            taken.callback(self._target.give_back, target)
            drafter: Drafter | None = NGramDrafter() if draft == "ngram" else None
            if draft == "model" and self._draft is not None:
                model = self._draft.take()
                taken.callback(self._draft.give_back, model)
                drafter = ModelDrafter(model, target.spec.vocab_size)
            yield from generate_tokens(tokens, target, drafter, limits, stats)


class Stream:
    """Pieces of text as they become final. Iterate once; close it to stop early and free the sequence.

    The joined pieces equal ``result.text``. ``token_ids`` holds the new ids so far.
    """

    def __init__(self, runtime: Runtime, ids: list[int], limits: Limits, draft: str) -> None:
        self.stats = Stats()
        self.token_ids: list[int] = []
        self._result: Result | None = None
        self._pieces = self._run(runtime, ids, limits, draft)

    def _run(self, runtime: Runtime, ids: list[int], limits: Limits, draft: str) -> Iterator[str]:
        started = time.perf_counter()
        text = runtime.codec.stream()
        pieces: list[str] = []
        for emitted in runtime._tokens(ids, limits, draft, self.stats):
            self.token_ids += emitted
            if piece := "".join(map(text.push, emitted)):
                pieces.append(piece)
                yield piece
        if piece := text.flush():
            pieces.append(piece)
            yield piece
        self.stats.total_ms = (time.perf_counter() - started) * 1e3
        reason = self.stats.finish_reason or "length"
        self._result = Result(self.token_ids, "".join(pieces), reason, self.stats)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    @property
    def result(self) -> Result:
        """The whole. Raises ``RuntimeError`` before the stream has ended."""
        if self._result is None:
            raise RuntimeError("the stream has not ended; iterate it first")
        return self._result

    def close(self) -> None:
        """Stop between rounds and give the sequence's buffers back."""
        self._pieces.close()  # type: ignore[attr-defined]
