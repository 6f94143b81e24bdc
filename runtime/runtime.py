"""An open bundle: engines with their weights, a pool of slots, ``generate`` and ``stream``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from specrt.engines.backends import open_backend
from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest, manifest_from_bundle
from specrt.engines.processor import available_cores
from specrt.engines.progress import SILENT, Progress
from specrt.engines.storage.integrity import check_files
from specrt.runtime.completion import Completion
from specrt.runtime.drafting.adaptive import NGRAM_LENGTHS, AdaptiveDrafter, OnlineEstimates
from specrt.runtime.drafting.constrained import ConstrainedModelDrafter, certain_drafter
from specrt.runtime.drafting.drafters import DeferredDrafter, Drafter, ModelDrafter, NGramDrafter
from specrt.runtime.drafting.tuning import tuning_for
from specrt.runtime.model import KVCachedModel
from specrt.runtime.models import Models
from specrt.runtime.options import Options, options_of
from specrt.runtime.result import Result, Stats
from specrt.runtime.round import Round, generate_rounds
from specrt.runtime.sampling.draft_sampler import DraftSampler
from specrt.runtime.sampling.grammar import Constraint, Grammars, Vocabulary
from specrt.runtime.settings import Settings, settings_of
from specrt.runtime.slots import Slot, SlotPool
from specrt.runtime.stream import Stream
from specrt.runtime.target import Target
from specrt.runtime.text.codec import Prompt, TextCodec
from specrt.runtime.text.stops import StopWatch
from specrt.runtime.warming import warm_slot

if TYPE_CHECKING:
    from typing_extensions import Unpack


def load(
    bundle: str | Path,
    backend: str | None = None,
    threads: int | None = None,
    device: str | None = None,
    draft_backend: str | None = None,
    draft_device: str | None = None,
    warm: bool = False,
) -> Runtime:
    """Open a bundle for generation.

    ``threads`` defaults to the cores this process may use. ``device`` is ``cpu`` or ``cuda``; the default depends on
    the backend. The draft's backend and device default to the target's. With ``warm``, passes are run
    before the first text: see ``Runtime.warm``. Raises ``BundleError`` for a damaged bundle and ``BackendError`` if the
    bundle does not have the backend, or its library or device is missing.
    """
    runtime = Runtime(Path(bundle), backend, threads, device, draft_backend, draft_device)
    if warm:
        runtime.warm()
    return runtime


# Assumed cost of each further token of a pass, as a share of the first one's, until it is measured: fp32, quantized
# (more computation per byte). docs/performance.md
_SLOPES = (0.05, 0.15)


class Runtime:
    """An open bundle. Weights are loaded once; each generation takes its own KV buffers from a pool.

    ``generate`` and ``stream`` may be called from several threads. If the prompt shares a prefix with an earlier
    sequence, the KV of that prefix is reused, and only the rest is prefilled.

    ``backend`` and ``device`` are the target's; ``places`` are backend and device of target and draft, as text.
    """

    def __init__(
        self,
        bundle: Path,
        backend: str | None = None,
        threads: int | None = None,
        device: str | None = None,
        draft_backend: str | None = None,
        draft_device: str | None = None,
    ) -> None:
        if threads is not None and threads < 1:
            raise UsageError(f"threads: got {threads}, expected 1 or more")
        self.manifest: Manifest = manifest_from_bundle(bundle)
        opened = open_backend(bundle, self.manifest, backend, device, threads)
        self.backend, self.device = opened.name, opened.device
        check_files(bundle, self.manifest)
        target, draft = self.manifest.target, self.manifest.draft
        self._vocab_size = target.spec.vocab_size
        self.codec = TextCodec.from_bundle(bundle, self.manifest.tokenizer, self._vocab_size)
        self._grammars = Grammars(self._vocabulary, self.manifest.eos_token_ids)
        self._models = Models(bundle, self.manifest, opened, threads, draft_backend, draft_device)
        self.places = self._models.places
        self._pool = SlotPool(self._models.new_slot)
        entry = draft.model or target
        slopes = (_SLOPES[target.quantization != "none"], _SLOPES[entry.quantization != "none"])
        tuning = tuning_for(bundle, self.places, threads or available_cores(), warnings.warn)
        self.estimates = OnlineEstimates.of(
            self.manifest.num_speculative_tokens,
            slopes,
            target_ms=tuning.target_ms if tuning else None,
            draft_ms=tuning.draft_ms if tuning else None,
            rates=tuning.acceptance if tuning else None,
            further_reads=(target.further_reads, entry.further_reads),
        )

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Generate the text in pieces; ``Stream.result`` is available at the end.

        ``prompt`` is a text, a list of chat messages or a list of token ids. Options and their defaults are those of
        ``specrt.runtime.options.GenerationOptions``; without options, decoding is greedy, with the bundle's
        draft and K. Raises ``UsageError``.
        """
        wanted = options_of(options)
        settings = settings_of(wanted, self.manifest, self._models.shares_memory)
        ids = self.codec.encode(prompt, wanted.chat)
        max_seq_len = self.manifest.target.spec.max_seq_len
        if len(ids) >= max_seq_len:
            raise UsageError(
                f"prompt: {len(ids)} tokens, the bundle's context is {max_seq_len} and the answer needs one at least; "
                "shorten it, or export with a larger --max-seq-len"
            )
        text = StopWatch(self.codec.stream(wanted.visible_special_tokens), settings.stop)
        constraint: Constraint | None = None
        if settings.structure is not None:
            greedy = settings.is_greedy
            constraint = self._grammars.constraint(settings.structure, settings.ending_ids, len(ids), best_only=greedy)
        completion, stats = Completion(ids, settings, max_seq_len, text, constraint), Stats()
        return Stream(self._pooled_rounds(completion, stats), completion, text, stats)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Generate the whole text; see ``stream``."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def reserve(self, num_sequences: int) -> None:
        """Allocate and write the memory of ``num_sequences`` sequences now, so that none takes more when it grows."""
        for slot in [self._models.with_draft(self._models.new_slot()) for _ in range(num_sequences)]:
            slot.touch()
            self._pool.give_back(slot)

    def warm(self, progress: Progress = SILENT) -> None:
        """Run every pass of a round and every sampler once, in an idle slot, and store what the library compiled.

        Afterwards a text in that slot compiles nothing, and the next process finds the kernels in ``cache_paths``. On a
        GPU rounds are run as well, until they are captured as CUDA graphs.
        """
        slot = self._pool.take([], 1)
        try:
            warm_slot(self, self._models.with_draft(slot), progress)
        finally:
            self._pool.give_back(slot)
        for backend in self._models.backends:
            backend.save_cache()

    @property
    def cache_paths(self) -> list[Path]:
        """The files of the kernels that its backends compile on this machine; empty if they compile none."""
        return [backend.cache_path for backend in self._models.backends if backend.cache_path is not None]

    @property
    def num_idle_slots(self) -> int:
        """Slots that are not used by a sequence."""
        return len(self._pool)

    def open_slot(self, draft: str) -> Slot:
        """A slot outside the pool, for checks and measurements; close it afterwards.

        ``draft`` is ``none``, ``model`` (the bundle's) or ``self``: the target on separate buffers, in any bundle. Its
        passes have two rows or more, so its logits are bit-identical to a reproducible target's. The draft has its own
        cache, also in bundles where drafts of a generation read the target's.
        """
        return self._models.open_slot(draft)

    def begin(
        self, slot: Slot, prompt: Sequence[int], settings: Settings, constraint: Constraint | None = None
    ) -> tuple[Target, Drafter]:
        """Target and drafter of a generation in ``slot``. ``settings.draft`` chooses the drafter."""
        slot.target.begin(prompt, _min_width(settings))
        target = Target(slot.target, settings, len(prompt), constraint)
        model: ModelDrafter | None = None
        if settings.draft in ("model", "auto"):
            model = self._begin_draft(slot, prompt, settings, target, constraint)
        if not settings.is_adaptive:
            return target, model or certain_drafter(settings, constraint)
        ngram = NGramDrafter(NGRAM_LENGTHS[0], NGRAM_LENGTHS[-1]) if settings.draft in ("ngram", "auto") else None
        end = min(len(prompt) + settings.max_new_tokens, self.manifest.target.spec.max_seq_len)
        return target, AdaptiveDrafter(
            ngram, model, self.estimates, _min_width(settings), end=end, constraint=constraint
        )

    def _begin_draft(
        self, slot: Slot, prompt: Sequence[int], settings: Settings, target: Target, constraint: Constraint | None
    ) -> ModelDrafter:
        draft = self._models.with_draft(slot).draft
        assert draft is not None, "settings allow draft 'model' only where the bundle has one"
        draft.begin(prompt, min_width=1)
        sampler = DraftSampler(draft, slot.target, settings, len(prompt), constraint)
        model = draft.model
        if self._is_deferred(model, target.model, settings):
            return DeferredDrafter(model, sampler, self._vocab_size, target.sampler)
        if constraint is not None:
            return ConstrainedModelDrafter(model, sampler, self._vocab_size, constraint)
        return ModelDrafter(model, sampler, self._vocab_size)

    def _is_deferred(self, draft: KVCachedModel, target: KVCachedModel, settings: Settings) -> bool:
        """Whether drafted ids go from draft to target on the device, without the host.

        Then the host must not need them for penalties, processors or grammars. All must be in the target's vocabulary.
        """
        is_processed = settings.penalizes or bool(settings.logits_processors) or settings.structure is not None
        is_known = not settings.is_greedy or draft.spec.vocab_size <= self._vocab_size
        is_async = self._models.shares_memory and draft.binding.is_async and target.binding.is_async
        return is_async and is_known and not is_processed

    def close(self) -> None:
        """Free the KV buffers that are not in use. Weights are freed with the object."""
        self._pool.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _vocabulary(self) -> Vocabulary:
        """The vocabulary for grammars. Raises ``UsageError`` if a text is not the bytes of its tokens, joined."""
        if not self.codec.is_joined:
            raise UsageError(
                "structured output: got a tokenizer whose texts are more than the bytes of their tokens (WordPiece, a "
                "suffix at the end of words, no decoder), expected one of bytes; leave the grammar out"
            )
        return Vocabulary(self.codec.token_bytes, self.codec.special_tokens.values(), self._vocab_size)

    def rounds(self, slot: Slot, completion: Completion, stats: Stats) -> Iterator[Round]:
        """``generate_rounds`` in ``slot``. ``stats`` is exact at every yield."""
        settings = completion.settings
        target, drafter = self.begin(slot, completion.tokens, settings, completion.constraint)
        stats.prompt_tokens, stats.reused_prompt_tokens = completion.num_prompt_tokens, target.model.kv_len
        for done in generate_rounds(completion, target, drafter):
            stats.add(done)
            yield done
        if settings.is_adaptive and self.estimates.target.is_known:
            stats.plain_round_ms = self.estimates.target.ms(_min_width(settings))

    def _pooled_rounds(self, completion: Completion, stats: Stats) -> Iterator[Round]:
        """``rounds`` in a slot from the pool, which is always returned."""
        slot = self._pool.take(completion.tokens, _min_width(completion.settings))
        try:
            yield from self.rounds(slot, completion, stats)
        except GeneratorExit:  # between two rounds, where the caller stopped
            raise
        except BaseException:  # it is unknown what was done of the round
            slot.forget()
            raise
        finally:
            self._pool.give_back(slot)


def _min_width(settings: Settings) -> int:
    return 2 if settings.reproducible else 1
