"""The effective settings of a generation, and the source of each. These are the rules:

* Values from the caller are used. The model's generation config is used only with ``model_defaults``, for options that
  the caller did not set. All others are neutral: temperature 0, no filter, no penalty.
* Greedy: temperature below 1e-5, ``top_k`` 1, ``top_p`` below 1e-6 or ``min_p`` 1 leave one id (ties: the first).
* The rule is ``match`` when greedy, with a seed, when the draft does not sample (n-gram, none), or when draft and
  target are on different devices; else ``block``.
* Without a K, K and draft are chosen in each round (``specrt.runtime.drafting.adaptive``), with K up to the bundle's.
* A seed implies ``reproducible`` where the rule is ``match``.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from reprlib import repr as short_repr
from typing import Any

from specrt.engines.errors import UsageError
from specrt.engines.manifest import Manifest
from specrt.engines.samplers import BLOCK, MATCH
from specrt.runtime.options import OPTIONS, GenerationOptions, LogitsProcessor, checked, neutral
from specrt.runtime.structured import Grammar

# Numbers that are neutral unless the caller or the model's generation config sets them.
SAMPLING = tuple(name for name, option in OPTIONS.items() if option.neutral is not None)
_GIVEN, _DEFAULT, _MODEL = "given", "default", "the model's generation config"


@dataclass(frozen=True)
class Settings:
    """The settings of a generation. ``sources`` has the source of each value, by name."""

    max_new_tokens: int = neutral("max_new_tokens")
    num_speculative_tokens: int = 0
    draft: str = "none"
    rule: str = MATCH
    temperature: float = neutral("temperature")
    top_k: int = neutral("top_k")
    top_p: float = neutral("top_p")
    min_p: float = neutral("min_p")
    seed: int | None = None
    reproducible: bool = False
    is_adaptive: bool = False
    repetition_penalty: float = neutral("repetition_penalty")
    presence_penalty: float = neutral("presence_penalty")
    frequency_penalty: float = neutral("frequency_penalty")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: Sequence[int] = ()
    min_new_tokens: int = neutral("min_new_tokens")
    ending_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    logprobs: int | None = None
    structure: Grammar | None = None
    logits_processors: Sequence[LogitsProcessor] = field(default=(), repr=False)
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether logits are changed before verification by something other than processors."""
        changed = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return bool(changed or self.logit_bias or self.banned_token_ids or (self.min_new_tokens and self.ending_ids))

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """``{name: {value, source}}``, as ``--json`` prints it."""
        shown = [f.name for f in fields(self) if f.name not in ("sources", "logits_processors")]
        values: dict[str, Any] = {name: getattr(self, name) for name in shown}
        values["logits_processors"] = len(self.logits_processors)
        return {
            name: {
                "value": list(value) if isinstance(value, tuple) else value,
                "source": self.sources.get(name, _DEFAULT),
            }
            for name, value in values.items()
        }


def settings_of(options: GenerationOptions, manifest: Manifest, shares_memory: bool = True) -> Settings:
    """Resolve ``options``. ``shares_memory``: draft and target are on one device. Raises ``UsageError``."""
    sources: dict[str, str] = {}
    values = {name: _sampling_value(name, options, manifest, sources) for name in SAMPLING}
    _check_model_defaults(values, sources)
    if values["top_k"] >= manifest.target.spec.vocab_size:
        values["top_k"], sources["top_k"] = 0, "the number of ids"
    if reason := _why_greedy(values):
        values.update(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
        sources.update(dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), reason))
    k = _num_speculative_tokens(options, manifest, sources)
    is_greedy = values["temperature"] == 0
    is_adaptive = _is_adaptive(options, k, is_greedy, sources)
    draft = _draft(options, manifest, k, is_adaptive, sources)
    rule = _rule(options, draft, is_greedy, shares_memory, sources)
    eos = () if options.ignore_eos else manifest.eos_token_ids
    sources["ending_ids"] = "ignore_eos and stop_token_ids" if options.ignore_eos else "EOS ids and stop_token_ids"
    _check_ids(options, manifest.target.spec.vocab_size)
    ending_ids = {*eos, *options.stop_token_ids}
    _check_left(options, ending_ids, manifest.target.spec.vocab_size)
    for name, option in OPTIONS.items():
        if name in Settings.__dataclass_fields__ and getattr(options, name) != option.default:
            sources.setdefault(name, _GIVEN)
    if options.structure is not None:
        sources["structure"] = _GIVEN
    return Settings(
        max_new_tokens=options.max_new_tokens,
        num_speculative_tokens=k,
        is_adaptive=is_adaptive,
        draft=draft,
        rule=rule,
        temperature=float(values["temperature"]),
        top_k=int(values["top_k"]),
        top_p=float(values["top_p"]),
        min_p=float(values["min_p"]),
        seed=_seed(options, is_greedy, sources),
        reproducible=_reproducible(options, rule, sources),
        repetition_penalty=float(values["repetition_penalty"]),
        presence_penalty=float(values["presence_penalty"]),
        frequency_penalty=float(values["frequency_penalty"]),
        logit_bias=dict(options.logit_bias or {}),
        banned_token_ids=tuple(options.banned_token_ids),
        min_new_tokens=options.min_new_tokens,
        ending_ids=tuple(sorted(ending_ids)),
        stop=tuple(options.stop),
        logprobs=options.logprobs,
        structure=options.structure,
        logits_processors=tuple(options.logits_processors),
        sources=sources,
    )


def _sampling_value(name: str, options: GenerationOptions, manifest: Manifest, sources: dict[str, str]) -> float:
    given = getattr(options, name)
    if given is not None:
        sources[name] = _GIVEN
        return float(given)
    if options.model_defaults and name in manifest.generation_defaults:
        sources[name] = _MODEL
        return manifest.generation_defaults[name]
    return float(neutral(name))


def _check_model_defaults(values: Mapping[str, float], sources: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if a value of the model's generation config is out of range."""
    for name, source in sources.items():
        if source == _MODEL:
            value: Any = int(values[name]) if name == "top_k" else values[name]
            try:
                checked(name, value)
            except UsageError as error:
                raise UsageError(f"{error} (from {_MODEL}; give {name} yourself)") from error


def _why_greedy(values: Mapping[str, float]) -> str | None:
    """Why decoding is greedy at a temperature above 0; None if it is not, or the temperature is 0."""
    if values["temperature"] == 0:
        return None
    reasons = {
        "below 1e-5 is greedy": values["temperature"] < 1e-5,
        "top_k 1 is greedy": values["top_k"] == 1,
        "top_p near 0 is greedy": values["top_p"] < 1e-6,
        "min_p 1 is greedy": values["min_p"] == 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _num_speculative_tokens(options: GenerationOptions, manifest: Manifest, sources: dict[str, str]) -> int:
    built, wanted = manifest.num_speculative_tokens, options.num_speculative_tokens
    sources["num_speculative_tokens"] = "the bundle's" if wanted is None else _GIVEN
    if wanted is None:
        return 0 if options.draft == "none" else built
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= built:
        raise UsageError(
            f"num_speculative_tokens: got {wanted}, this bundle was exported for 0 to {built}; "
            f"export again with --num-speculative-tokens {wanted}"
        )
    return wanted if options.draft != "none" else 0


def _is_adaptive(options: GenerationOptions, k: int, is_greedy: bool, sources: dict[str, str]) -> bool:
    """Whether K is chosen in each round, up to ``k``. Not with a seed whose draws are keyed by round."""
    is_asked = options.draft == "auto"
    if k == 0 or (options.num_speculative_tokens is not None and not is_asked):
        sources["is_adaptive"] = "K is given" if k else "K is 0"
        return False
    if options.seed is not None and options.rule not in (None, MATCH) and not is_greedy:
        sources["is_adaptive"] = f"seed with rule {options.rule}"
        return False
    sources["is_adaptive"] = "draft is auto" if is_asked else "K is not given"
    sources["num_speculative_tokens"] += ", as the maximum"
    return True


def _draft(options: GenerationOptions, manifest: Manifest, k: int, is_adaptive: bool, sources: dict[str, str]) -> str:
    has_model = manifest.draft.kind != "ngram"
    if options.draft == "model" and not has_model:
        raise UsageError(
            "draft: got 'model', but this bundle has none; export again with --draft MODEL or --draft self"
        )
    if k == 0:
        sources["draft"] = "K is 0" if options.draft != "none" else _GIVEN
        return "none"
    sources["draft"] = "the bundle's" if options.draft is None else _GIVEN
    own = "ngram" if not has_model else "auto" if is_adaptive else "model"
    return own if options.draft in (None, "auto") else str(options.draft)


def _rule(options: GenerationOptions, draft: str, is_greedy: bool, shares_memory: bool, sources: dict[str, str]) -> str:
    if is_greedy or draft == "none":
        sources["rule"] = "both rules are the same when greedy" if is_greedy else "nothing is drafted"
        return MATCH
    samples = draft in ("model", "auto")
    if options.rule is not None:
        if options.rule != MATCH and not samples:
            raise UsageError(
                f"rule: got {options.rule!r}, but {draft} drafts are not sampled; use 'match', which accepts as much "
                "of them, or a bundle with a draft model"
            )
        if options.rule != MATCH and not shares_memory:
            raise UsageError(
                f"rule: got {options.rule!r}, but the draft is on another device than the target, which would have to "
                "read its probabilities; use 'match', or one device for both"
            )
        sources["rule"] = _GIVEN
        return options.rule
    if options.seed is not None:
        sources["rule"] = "implied by seed"
        return MATCH
    if samples and not shares_memory:
        sources["rule"] = "the draft is on another device"
        return MATCH
    sources["rule"] = "the draft samples" if samples else "the draft does not sample"
    return BLOCK if samples else MATCH


def _seed(options: GenerationOptions, is_greedy: bool, sources: dict[str, str]) -> int | None:
    if options.seed is not None:
        sources["seed"] = _GIVEN
        return options.seed
    if is_greedy:
        return None
    sources["seed"] = "drawn for this generation"
    return secrets.randbits(63)


def _reproducible(options: GenerationOptions, rule: str, sources: dict[str, str]) -> bool:
    if options.reproducible is not None:
        sources["reproducible"] = _GIVEN
        return options.reproducible
    if options.seed is not None and rule == MATCH:
        sources["reproducible"] = "implied by seed"
        return True
    return False


def _check_ids(options: GenerationOptions, vocab_size: int) -> None:
    groups = (
        ("logit_bias", options.logit_bias or {}),
        ("banned_token_ids", options.banned_token_ids),
        ("stop_token_ids", options.stop_token_ids),
    )
    for name, ids in groups:
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise UsageError(f"{name}: got {short_repr(token_id)}, expected ids in 0..{vocab_size - 1}")


def _check_left(options: GenerationOptions, ending_ids: Iterable[int], vocab_size: int) -> None:
    """Some id must be left."""
    excluded = {*options.banned_token_ids, *(ending_ids if options.min_new_tokens else ())}
    if len(excluded) >= vocab_size:
        raise UsageError(
            f"banned_token_ids: with the ids that min_new_tokens excludes, all {vocab_size} are; leave at least one"
        )
