"""The deterministic checks of ``specrt verify``: logits, rows, ids and caches of a bundle on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specrt.engines.contract import FEATURE_CACHE, LOGITS, past_name
from specrt.engines.interface import Array
from specrt.engines.manifest import ModelEntry
from specrt.runtime.drafting.head import HeadModel
from specrt.runtime.model import KVCachedModel
from specrt.runtime.options import Options
from specrt.runtime.runtime import Runtime
from specrt.runtime.settings import Settings
from specrt.runtime.slots import Slot, SlotModel
from specrt.runtime.widths import logits_of
from specrt.tools.bench.scores import first_difference
from specrt.tools.rounds import run_rounds
from specrt.tools.verify.logits import largest, read_features

if TYPE_CHECKING:
    from typing_extensions import Unpack

POISON = 1e4  # finite: masked values must not count, but 0 * NaN would spread
TEMPERATURES = (0.7, 1.0)
NEAR_TIE = 4  # the largest top-2 margin of a fork, in units of ``row_error``: two logits may each change by twice that


@dataclass(frozen=True)
class Check:
    """One line of the certificate. ``figures`` are the numbers behind ``found``."""

    name: str
    what: str
    found: str
    passed: bool
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Subject:
    """The open bundle, and the prompts (token ids) and settings of its checks.

    ``row_error`` is set by ``check_rows``: the difference of the target's logits between passes of one row and several.
    """

    bundle: Path
    runtime: Runtime
    prompts: list[list[int]]
    max_new_tokens: int
    num_draws: int
    row_error: float = 0.0

    @property
    def k(self) -> int:
        return self.runtime.manifest.num_speculative_tokens

    @property
    def ways(self) -> list[tuple[str, int]]:
        """(draft, K) to compare with plain decoding."""
        drafts = ["ngram"] if self.runtime.manifest.draft.kind == "ngram" else ["model", "ngram"]
        return [*product(drafts[:1], sorted({1, 2, self.k} & set(range(self.k + 1)))), *product(drafts[1:], [self.k])]

    @property
    def models(self) -> list[tuple[str, ModelEntry]]:
        manifest = self.runtime.manifest
        draft = [("draft", manifest.draft.model)] if manifest.draft.model else []
        return [("target", manifest.target), *draft]


def role_of(slot: Slot, role: str) -> SlotModel:
    """The target or the draft model of a slot that has both."""
    model = slot.target if role == "target" else slot.draft
    assert model is not None
    return model


def _references(subject: Subject) -> Iterator[tuple[str, ModelEntry, KVCachedModel, Mapping[str, Array]]]:
    """(role, entry, model, reference stored at export) of each model. A head's model holds the stored features."""
    slot = subject.runtime.open_slot("model" if len(subject.models) > 1 else "none")
    for role, entry in subject.models:
        stored, model = np.load(subject.bundle / entry.reference), role_of(slot, role).model
        read_features(model, stored)
        yield role, entry, model, stored
    slot.close()


def check_reference(subject: Subject) -> list[Check]:
    """Compare each model's graph with the torch model's logits that were stored at export."""
    found = []
    for role, entry, model, stored in _references(subject):
        got = logits_of(model, stored["ids"].tolist(), entry.spec.max_rows)[stored["positions"]]
        expected = stored["logits"]
        error, scale = float(np.abs(got - expected).max()), largest(expected)
        same = int((got.argmax(-1) == expected.argmax(-1)).sum())
        found.append(
            Check(
                f"{role}: reference",
                f"logits at {len(expected)} positions with those of the torch model, stored at export",
                f"largest difference {error:.1e} of {scale:.1f}, same argmax at {same}",
                bool(np.isfinite(got).all()) and error <= entry.logits_tolerance * scale,
                {"max_abs_error": error, "max_abs_logit": scale, "same_argmax": same},
            )
        )
    return found


def check_rows(subject: Subject) -> list[Check]:
    """Compare passes of several rows with passes of one row."""
    found = []
    for role, entry, model, stored in _references(subject):
        ids = stored["ids"].tolist()
        single = logits_of(model, ids, 1)
        widths = sorted({2, entry.spec.max_rows})
        error = max(float(np.abs(logits_of(model, ids, width) - single).max()) for width in widths)
        scale = largest(single)
        if role == "target":
            subject.row_error = error
        found.append(
            Check(
                f"{role}: rows",
                f"{len(ids)} positions in passes of 1 row with passes of {' and '.join(map(str, widths))}",
                f"largest difference {error:.1e} of {scale:.1f}",
                error <= entry.logits_tolerance * scale,
                {"max_abs_error": error, "max_abs_logit": scale},
            )
        )
    return found


def check_bits(subject: Subject) -> list[Check]:
    """The property that ``reproducible`` needs: passes of two or more rows agree to the last bit."""
    slot = subject.runtime.open_slot("none")
    model, spec = slot.target.model, subject.runtime.manifest.target.spec
    model.min_width = 2
    ids = np.load(subject.bundle / subject.runtime.manifest.target.reference)["ids"].tolist()
    widths = sorted({1, min(3, spec.max_rows), spec.max_rows})  # 1 is run as 2
    expected = logits_of(model, ids, 2)
    differing = [width for width in widths if not np.array_equal(logits_of(model, ids, width), expected)]
    for width in (len(ids), len(ids) // 2 + 1):  # like a prompt: only the last row has logits
        model.rollback(0)
        for start in range(0, len(ids), width):
            model.feed(ids[start : start + width], 1)
        if not np.array_equal(model.read(LOGITS)[0][0], expected[-1]):
            differing.append(width)
    slot.close()
    found = f"other bits at widths {differing}" if differing else "the same bits"
    shown = ", ".join(str(width) for width in sorted({2, *widths[1:]}))
    what = f"logits at {len(ids)} positions in passes of {shown} rows, and after a prefill in 1 and 2 chunks"
    return [Check("target: bits", what, found, not differing, {"widths_differing": differing})]


def check_greedy(subject: Subject) -> list[Check]:
    """Compare the greedy ids of each draft and K with plain decoding; a fork passes only at a near-tie."""
    plain, by_way = _all_ids(subject)
    found = []
    for (draft, k), got in by_way.items():
        forks = _forks(subject, plain, got)
        large = [fork for fork in forks if not fork["is_near_tie"]]
        found.append(
            Check(
                f"greedy: {draft}, K = {k}",
                f"ids of {len(plain)} prompts x {subject.max_new_tokens} with plain decoding",
                _described(forks, sum(map(len, got))),
                not large,
                {"forks": forks},
            )
        )
    return found


def check_self_draft(subject: Subject) -> list[Check]:
    """The target as its own draft must accept every token. Only this finds a draft cache that is off by one."""
    slot = subject.runtime.open_slot("self")
    drafted = accepted = 0
    settings = Settings(subject.max_new_tokens, subject.k, "model", reproducible=True)
    for prompt in subject.prompts:
        _, stats = run_rounds(subject.runtime, slot, prompt, settings)
        drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    slot.close()
    return [
        Check(
            "self-draft",
            f"drafts of the target itself, K = {subject.k}",
            f"{accepted} of {drafted} accepted",
            0 < drafted == accepted,
            {"drafted": drafted, "accepted": accepted},
        )
    ]


def check_seeds(subject: Subject) -> list[Check]:
    """With a seed, the ids are the same with any draft and any K."""
    found = []
    for temperature in TEMPERATURES:
        plain, by_way = _all_ids(subject, temperature=temperature, seed=17)
        differing = [f"{draft}, K = {k}" for (draft, k), got in by_way.items() if got != plain]
        found.append(
            Check(
                f"seed-exact: T = {temperature}",
                f"ids of {len(plain)} prompts in {len(subject.ways)} ways to draft with plain decoding, seed 17",
                f"different with {'; '.join(differing)}" if differing else "the same ids",
                not differing,
                {"differing": differing, "num_tokens": sum(map(len, plain))},
            )
        )
    return found


def check_caches(subject: Subject) -> list[Check]:
    """Compare caches after rounds, with every stale slot poisoned, with newly filled ones."""
    has_model = subject.runtime.manifest.draft.kind != "ngram"
    slot, fresh = (subject.runtime.open_slot("model" if has_model else "none") for _ in range(2))
    draft = "model" if has_model else "ngram"
    settings = Settings(subject.max_new_tokens, subject.k, draft, reproducible=True)
    worst, same_bits, num_compared = 0.0, True, 0
    for prompt in subject.prompts:
        tokens, _ = run_rounds(subject.runtime, slot, prompt, settings, lambda *_: _poison(slot))
        for used, new in zip((slot.target, slot.draft), (fresh.target, fresh.draft), strict=True):
            if used is None or new is None:
                continue
            used.model.min_width = new.model.min_width = 2
            new.model.rollback(0)
            for part in (used.model, new.model):
                part.feed(part.missing(tokens), 1)
            ours, theirs = used.model.read(LOGITS)[0][0], new.model.read(LOGITS)[0][0]
            worst = max(worst, float(np.abs(ours - theirs).max() / largest(theirs)))
            same_bits &= used is slot.draft or np.array_equal(ours, theirs)
            num_compared += 1
    slot.close()
    fresh.close()
    return [
        Check(
            "caches",
            f"logits on {num_compared} caches after rounds, stale slots set to {POISON:g}, with a fresh prefill",
            f"largest relative difference {worst:.1e}; the target's bits {'the same' if same_bits else 'differ'}",
            same_bits and worst <= max(entry.logits_tolerance for _, entry in subject.models),
            {"max_relative_error": worst, "target_bits_equal": same_bits},
        )
    ]


def _poison(slot: Slot) -> None:
    """Overwrite every KV slot, and every feature, after the committed ones."""
    for part in (slot.target, slot.draft):
        if part is not None:
            for (layer, _), name in product(enumerate(part.model.spec.kv_layers), ("key", "value")):
                (cache,) = part.model.read(past_name(name, layer))
                cache[:, :, part.model.kv_len :] = POISON
                part.model.binding.write(past_name(name, layer), cache)
            if isinstance(part.model, HeadModel):
                (features,) = part.model.read(FEATURE_CACHE)
                features[part.model.stale_rows()] = POISON
                part.model.binding.write(FEATURE_CACHE, features)


def _all_ids(
    subject: Subject, **sampling: Unpack[Options]
) -> tuple[list[list[int]], dict[tuple[str, int], list[list[int]]]]:
    """Ids of plain decoding and of each way to draft, for each prompt. A prompt's ways share its prefill."""
    ways = [("none", 0), *subject.ways]
    ids: dict[tuple[str, int], list[list[int]]] = {way: [] for way in ways}
    for prompt, (draft, k) in product(subject.prompts, ways):
        options = Options(max_new_tokens=subject.max_new_tokens, draft=draft, num_speculative_tokens=k)
        options.update(sampling)
        ids[draft, k].append(subject.runtime.generate(prompt, **options).token_ids)
    return ids.pop(("none", 0)), ids


def _forks(subject: Subject, plain: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Where ids differ, and the margin by which the target prefers its own id there."""
    forks = []
    for index, (prompt, expected, ids) in enumerate(zip(subject.prompts, plain, got, strict=True)):
        if difference := first_difference(str(index), expected, ids):
            position = difference.position
            slot = subject.runtime.open_slot("none")
            slot.target.model.feed([*prompt, *expected[:position]], 1)
            logits = slot.target.model.read(LOGITS)[0][0]
            second, first = np.sort(logits)[-2:].tolist()
            slot.close()
            margin = first - second
            is_near_tie = margin <= NEAR_TIE * subject.row_error
            forks.append({"prompt": index, "position": position, "margin": margin, "is_near_tie": is_near_tie})
    return forks


def _described(forks: Iterable[dict[str, Any]], num_tokens: int) -> str:
    texts = [f"prompt {f['prompt']} forks at {f['position']}, top-2 margin {f['margin']:.1e}" for f in forks]
    return "; ".join(texts) or f"{num_tokens} ids, all the same"
