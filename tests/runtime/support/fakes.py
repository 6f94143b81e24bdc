"""Models and samplers on the fake engine for the loop's tests: spies and scripted drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from specrt.engines.contract import INPUT_IDS, ModelSpec, past_name
from specrt.engines.fake import FakeEngine, FakeSampler, NextToken, fake_spec
from specrt.engines.interface import Array
from specrt.runtime.completion import Completion
from specrt.runtime.drafting.drafters import Drafter, ModelDrafter, NGramDrafter, NoDrafter
from specrt.runtime.model import KVCachedModel
from specrt.runtime.result import Stats
from specrt.runtime.round import generate_rounds
from specrt.runtime.sampling.draft_sampler import DraftSampler
from specrt.runtime.sampling.samplers import SamplerEngines
from specrt.runtime.settings import Settings
from specrt.runtime.slots import SlotModel
from specrt.runtime.target import Target
from tests.runtime.support.tables import VOCAB_SIZE

POISON = 1_000_003.0
PROMPT = [11, 7, 5, 3, 2]
ALL_K = range(1, 9)

# --- models --------------------------------------------------------------------------------------------------------


class Engine(FakeEngine):
    """Keeps its bindings and the widths and rows it ran, and refuses ids outside its vocabulary, as an embedding."""

    def __init__(self, spec: ModelSpec, next_token: NextToken) -> None:
        super().__init__(spec, next_token)
        self.spec = spec
        self.bindings: list[Any] = []
        self.widths: list[int] = []
        self.rows: list[int] = []

    def open(self, shared: Mapping[str, Array] | None = None) -> Any:
        self.bindings.append(super().open(shared))
        return self.bindings[-1]

    @property
    def num_open(self) -> int:
        """Bindings that were not closed."""
        return sum(binding.is_open for binding in self.bindings)

    def compute(self, host: Mapping[str, Array], width: int, rows: int) -> None:
        fed = host[INPUT_IDS][0, :width]
        assert fed.min() >= 0 and fed.max() < self.spec.vocab_size
        self.widths.append(width)
        self.rows.append(rows)
        super().compute(host, width, rows)


def cache_of(model: KVCachedModel) -> Array:
    """The token ids in the cache of a model on ``Engine``, stale ones included. [capacity] f32"""
    return model.binding.host[past_name("key", 0)].reshape(-1)


def engine_of(next_token: NextToken, max_seq_len: int = 256, vocab_size: int = VOCAB_SIZE) -> Engine:
    return Engine(fake_spec(vocab_size, max_seq_len), next_token)


LoadSampler = Callable[[ModelSpec, str, int], FakeSampler]


def slot_of(
    engine: Engine,
    vocab_size: int | None = None,
    max_rows: int | None = None,
    load: LoadSampler = FakeSampler,
) -> SlotModel:
    """A cache of ``engine`` and its samplers, for ``vocab_size`` probabilities and at most ``max_rows`` rows."""
    spec = replace(engine.spec, max_rows=max_rows or engine.spec.max_rows)
    size = engine.spec.vocab_size if vocab_size is None else vocab_size
    samplers = SamplerEngines(lambda name: load(spec, name, size))
    return SlotModel(KVCachedModel(engine, engine.spec), samplers)


def open_target(engine: Engine) -> Target:
    """A greedy target."""
    return Target(slot_of(engine), Settings(), 0)


class Draft(NamedTuple):
    """What a ``ModelDrafter`` drafts with."""

    model: KVCachedModel
    sampler: DraftSampler


def open_draft(engine: Engine) -> Draft:
    """A greedy draft, whose samplers verify one row."""
    opened = slot_of(engine, max_rows=1)
    return Draft(opened.model, DraftSampler(opened, opened, Settings(), 0))


# --- the loop ------------------------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """When to stop: ids that end the text, new tokens wanted, and the target's context. And K."""

    ending_ids: frozenset[int]
    max_new_tokens: int
    max_seq_len: int
    k: int

    def completion(self, prompt: Sequence[int]) -> Completion:
        settings = Settings(self.max_new_tokens, self.k, ending_ids=tuple(self.ending_ids))
        return Completion(prompt, settings, self.max_seq_len)


def limits_of(k: int, max_new_tokens: int, eos: Sequence[int] = (), max_seq_len: int = 256) -> Limits:
    return Limits(frozenset(eos), max_new_tokens, max_seq_len, k)


class Script:
    """Drafts the next ids of ``tokens``, except for the token at ``wrong`` (``bad`` or another one).

    ``calls`` has each k, and 0 for the prefill.
    """

    is_sampled = True

    def __init__(self, tokens: Sequence[int], wrong: int, bad: int | None = None) -> None:
        self.tokens, self.wrong, self.bad = list(tokens), wrong, bad
        self.calls: list[int] = []
        self.commits: list[int] = []

    def prefill(self, committed: Sequence[int]) -> None:
        self.calls.append(0)
        assert list(committed) == self.tokens[: len(committed)]

    def propose(self, committed: Sequence[int], k: int) -> list[int]:
        self.calls.append(k)
        assert list(committed) == self.tokens[: len(committed)]
        drafted = self.tokens[len(committed) :][:k]
        if self.wrong < len(drafted):
            drafted[self.wrong] = drafted[self.wrong] ^ 1 if self.bad is None else self.bad
        return drafted

    def rollback(self, num_committed: int) -> None:
        self.commits.append(num_committed)


@dataclass
class Run:
    """One generation: what each round emitted, all new ids, and the figures."""

    rounds: list[list[int]]
    token_ids: list[int]
    stats: Stats
    finish_reason: str | None


Between = Callable[[list[int]], None]


def run(
    target: Target,
    drafter: Drafter | None,
    limits: Limits,
    prompt: Sequence[int] = PROMPT,
    between: Between = lambda tokens: None,
) -> Run:
    """Generate to the end; ``between`` is called with the committed tokens after each round."""
    completion, stats, rounds = limits.completion(prompt), Stats(), []
    for done in generate_rounds(completion, target, drafter or NoDrafter()):
        stats.add(done)
        if done.emitted:  # not a pass of a long prompt
            rounds.append(list(done.emitted))
            between(completion.tokens)
        assert done.finish_reason == completion.finish_reason
    assert list(chain.from_iterable(rounds)) == completion.new_tokens
    return Run(rounds, completion.new_tokens, stats, completion.finish_reason)


def figures(stats: Stats) -> tuple[int, int, int, int, list[int]]:
    return stats.rounds, stats.drafted, stats.accepted, stats.own, stats.acceptance_histogram


class Pair:
    """A target and a draft in one slot, for one generation after another, as the runtime begins them."""

    def __init__(self, target: Engine, draft: Engine, load: LoadSampler = FakeSampler) -> None:
        vocab_size = target.spec.vocab_size
        self.engine, self.draft_engine = target, draft
        self.target = slot_of(target, load=load)
        self.draft = slot_of(draft, vocab_size, max_rows=1, load=load)

    def begin_target(self, settings: Settings, prompt: Sequence[int]) -> Target:
        self.target.begin(prompt, 2 if settings.reproducible else 1)
        return Target(self.target, settings, len(prompt))

    def begin_draft(self, settings: Settings, prompt: Sequence[int]) -> Draft:
        self.draft.begin(prompt, 1)
        return Draft(self.draft.model, DraftSampler(self.draft, self.target, settings, len(prompt)))

    def run(
        self,
        settings: Settings,
        prompt: Sequence[int] = PROMPT,
        drafter: Drafter | None = None,
        between: Between = lambda tokens: None,
    ) -> Run:
        """A generation with ``drafter``, or else with what ``settings`` name."""
        target = self.begin_target(settings, prompt)
        if settings.draft == "model" and drafter is None:
            drafter = ModelDrafter(*self.begin_draft(settings, prompt), self.engine.spec.vocab_size)
        elif settings.draft == "ngram":
            drafter = NGramDrafter()
        k, max_seq_len = settings.num_speculative_tokens, self.engine.spec.max_seq_len
        limits = Limits(frozenset(settings.ending_ids), settings.max_new_tokens, max_seq_len, k)
        return run(target, drafter, limits, prompt, between)


def pair_of(
    target: NextToken,
    draft: NextToken | None,
    vocab_size: int,
    draft_vocab_size: int | None = None,
    load: LoadSampler = FakeSampler,
) -> Pair:
    """A pair for K up to 8 and 256 tokens; without ``draft`` the target drafts for itself."""
    engine = engine_of(target, vocab_size=vocab_size)
    drafting = engine if draft is None else engine_of(draft, vocab_size=draft_vocab_size or vocab_size)
    return Pair(engine, drafting, load)


Table = Callable[[Sequence[int]], int]


def plain(next_token: Table, prompt: Sequence[int], limits: Limits) -> tuple[list[int], str]:
    """PLAIN: the new ids and the finish reason."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + limits.max_new_tokens, limits.max_seq_len):
        tokens.append(next_token(tokens))
        if tokens[-1] in limits.ending_ids:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


def continuation(next_token: Table, count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The prompt and ``count`` tokens after it."""
    return [*prompt, *plain(next_token, prompt, limits_of(0, count))[0]]
