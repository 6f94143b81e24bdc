"""The round: draft, verify, commit, roll back. It does not deal with devices, text or statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from specrt.runtime.completion import Completion
from specrt.runtime.drafting.drafters import Drafter
from specrt.runtime.sampling.logprobs import TokenLogprobs
from specrt.runtime.target import Target


@dataclass(frozen=True)
class Round:
    """One step of a generation. Times in ms.

    The first step is the prefill, which drafts nothing and emits one token. A long prompt takes several passes, and
    each pass before the last is a separate step that emits nothing. ``emitted`` are the committed ids: the first
    ``num_accepted`` of ``drafted``, then the target's own, unless the completion ended earlier. ``logprobs`` has an
    entry for each of them if requested. ``finish_reason`` is the completion's; it is None except in the last step.
    ``prefill_ms`` is the time of the prompt's passes. The target's are in the prefill steps, the draft's in the step
    after them.
    """

    emitted: list[int]
    drafted: Sequence[int] = ()
    num_accepted: int = 0
    finish_reason: str | None = None
    logprobs: Sequence[TokenLogprobs] = ()
    is_prefill: bool = False
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0


def generate_rounds(completion: Completion, target: Target, drafter: Drafter) -> Iterator[Round]:
    """Extend ``completion`` to its end; yield each step, the prefill first. Yields nothing if no token may be added.

    At each yield after the prefill the caches hold all committed tokens except the newest (the draft's from the second
    yield on), so a generation may be stopped there. During the prefill they hold a part of the prompt.
    """
    tokens = completion.tokens
    if not completion.num_left:
        return
    yield from _passes_before_the_last(target, tokens)
    started = perf_counter()
    _, token = target.verify(tokens, ())
    prefill_ms = _ms_since(started)
    emitted = completion.commit([token])
    yield Round(
        emitted,
        finish_reason=completion.finish_reason,
        logprobs=target.logprobs,
        is_prefill=True,
        prefill_ms=prefill_ms,
    )

    started = perf_counter()
    if completion.num_left > 1:
        drafter.prefill(tokens[:-1])
    prefill_ms = _ms_since(started)
    while (num_left := completion.num_left) > 0:
        k = min(completion.settings.num_speculative_tokens, num_left - 1)
        started = perf_counter()
        drafted = drafter.propose(tokens, k) if k else []
        draft_ms, started = _ms_since(started), perf_counter()
        accepted, token = target.verify(tokens, drafted, drafter.is_sampled)
        verify_ms = _ms_since(started)
        emitted = completion.commit([*drafted[:accepted], token])
        target.rollback(len(tokens))
        drafter.rollback(len(tokens))
        yield Round(
            emitted,
            drafted,
            num_accepted=min(accepted, len(emitted)),
            finish_reason=completion.finish_reason,
            logprobs=target.logprobs[: len(emitted)],
            prefill_ms=prefill_ms,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
        )
        prefill_ms = 0.0


def _passes_before_the_last(target: Target, tokens: Sequence[int]) -> Iterator[Round]:
    """All passes of a long prompt except the last, as steps, so that other sequences can run in between."""
    model, width = target.model, target.model.spec.max_width
    while len(tokens) - model.kv_len > width:
        started = perf_counter()
        model.feed(tokens[model.kv_len : model.kv_len + width], 1)
        yield Round([], is_prefill=True, prefill_ms=_ms_since(started))


def _ms_since(started: float) -> float:
    return (perf_counter() - started) * 1e3
