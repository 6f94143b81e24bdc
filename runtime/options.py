"""What a caller asks of a generation. None means: not asked for (``specrt.runtime.settings`` has the rules)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypedDict

from specrt.engines.errors import UsageError
from specrt.engines.interface import Array
from specrt.engines.samplers import BLOCK, MATCH, MAX_TOP_LOGPROBS, NUM_SORTED_WIDE
from specrt.runtime.sampling.uniforms import MAX_SEED
from specrt.runtime.text.messages import ChatOptions
from specrt.runtime.text.stops import checked_stops

RULES = (MATCH, BLOCK)
DRAFTS = ("auto", "ngram", "model", "none")

# (prompt and output so far, drafted ids too; logits [V] f32, which it may change) -> None, or logits to use instead
LogitsProcessor = Callable[[Sequence[int], Array], Array | None]


class Options(TypedDict, total=False):
    """The keyword arguments of ``generate`` and ``stream``; see ``GenerationOptions``."""

    max_new_tokens: int
    num_speculative_tokens: int | None
    draft: str | None
    rule: str | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    banned_token_ids: Sequence[int]
    logits_processors: Sequence[LogitsProcessor]
    min_new_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    logprobs: int | None
    visible_special_tokens: Sequence[str]
    reproducible: bool | None
    model_defaults: bool
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | str
    chat_template_name: str | None


@dataclass(frozen=True)
class GenerationOptions:
    """The options of one generation, checked. Raises ``UsageError`` for a value out of its range.

    * ``max_new_tokens``: the most new tokens; ``min_new_tokens``: no EOS, stop id or stop string ends the text before.
    * ``num_speculative_tokens``: K, 0 for plain decoding; ``draft``: ``ngram``, ``model``, ``none``, or
      ``auto``, in each round the one that pays best. Without a K, each round's own is chosen, up to the bundle's
      (``specrt.runtime.drafting.adaptive``).
    * ``rule``: ``match`` or ``block``.
    * ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter nothing.
    * ``seed``: the text is then a function of seed and target alone, the same with any draft and any K, where the
      rule is ``match``; with another rule, asked for by ``rule``, it can be repeated with the same draft and K.
    * ``repetition_penalty`` divides (or multiplies) the logits of ids that occur in prompt or output;
      ``presence_penalty`` and ``frequency_penalty`` are subtracted for ids of the output, once or for each occurrence.
    * ``logit_bias`` is added to the logits of an id; ``banned_token_ids`` cannot be generated.
    * ``logits_processors``: Python callables, applied in turn after the penalties, to target and draft. They see only
      prefixes that they have allowed themselves, must depend on their arguments alone, and cost a way over the host.
    * ``stop``: strings that end the text and are not part of it; ``stop_token_ids``: ids that end it as EOS does.
    * ``logprobs``: that many of the target's most likely ids next to the log-probability of each emitted token.
    * ``visible_special_tokens``: special tokens whose names are part of the text, such as the mark of a tool call.
    * ``reproducible``: no pass narrower than two rows, so that logits are the same bits for every K and draft.
    * ``model_defaults``: what is not given is taken from the model's own generation config.
    * ``chat_template_kwargs``, ``tools``, ``add_generation_prompt``, ``continue_final_message`` and
      ``chat_template_name``: how messages become text (``specrt.runtime.text.messages.ChatOptions``).
    """

    max_new_tokens: int = 256
    num_speculative_tokens: int | None = None
    draft: str | None = None
    rule: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    banned_token_ids: Sequence[int] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    visible_special_tokens: Sequence[str] = ()
    reproducible: bool | None = None
    model_defaults: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | str = False
    chat_template_name: str | None = None

    @property
    def chat(self) -> ChatOptions:
        """Those that a chat template gets. Raises ``UsageError`` for what does not fit."""
        return ChatOptions(**{f.name: getattr(self, f.name) for f in fields(ChatOptions) if f.init})

    def __post_init__(self) -> None:
        for name, low, high, whole in _RANGES:
            value = getattr(self, name)
            if value is not None or name in ("max_new_tokens", "min_new_tokens"):
                object.__setattr__(self, name, _checked_number(name, value, low, high, whole))
        for name, choices in (("rule", RULES), ("draft", DRAFTS)):
            if (value := getattr(self, name)) is not None and value not in choices:
                raise UsageError(f"{name}: got {value!r}, expected one of {', '.join(choices)}")
        if self.min_new_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_new_tokens: got {self.min_new_tokens}, expected at most max_new_tokens ({self.max_new_tokens})"
            )
        if self.repetition_penalty is not None and self.repetition_penalty <= 0:
            raise UsageError(f"repetition_penalty: got {self.repetition_penalty}, expected more than 0; 1 is neutral")
        for name in ("banned_token_ids", "stop_token_ids"):
            ids = _checked_sequence(name, getattr(self, name), "token ids")
            object.__setattr__(self, name, tuple(map(_plain, ids)))  # settings know the vocabulary
        self._check_bias()
        visible = _checked_sequence("visible_special_tokens", self.visible_special_tokens, "tokens")
        object.__setattr__(self, "visible_special_tokens", visible)
        processors = _checked_sequence("logits_processors", self.logits_processors, "callables (token_ids, logits)")
        if wrong := [processor for processor in processors if not callable(processor)]:
            raise UsageError(f"logits_processors: got {wrong[0]!r}, expected callables (token_ids, logits)")
        object.__setattr__(self, "logits_processors", processors)
        object.__setattr__(self, "stop", checked_stops(self.stop))
        _ = self.chat

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping | None):
            raise UsageError(f"logit_bias: got {type(self.logit_bias).__name__}, expected {{token id: bias}}")
        bias = {
            _plain(token_id): _checked_number("logit_bias", value, -1e4, 1e4, False)
            for token_id, value in (self.logit_bias or {}).items()
        }
        object.__setattr__(self, "logit_bias", bias or None)


# name, least, most, whole numbers only
_RANGES: tuple[tuple[str, float, float, bool], ...] = (
    ("max_new_tokens", 0, float("inf"), True),
    ("min_new_tokens", 0, float("inf"), True),
    ("temperature", 0, 100, False),
    ("top_k", 0, NUM_SORTED_WIDE, True),
    ("top_p", 0, 1, False),
    ("min_p", 0, 1, False),
    ("seed", 0, MAX_SEED, True),
    ("repetition_penalty", 0, 100, False),
    ("presence_penalty", -100, 100, False),
    ("frequency_penalty", -100, 100, False),
    ("logprobs", 0, MAX_TOP_LOGPROBS, True),
)


def _checked_number(name: str, value: Any, low: float, high: float, whole: bool) -> int | float:
    """``value`` as Python's own number. Raises ``UsageError`` unless it is one of the range."""
    is_number = isinstance(value, Integral) or (isinstance(value, Real) and not whole)
    if not is_number or isinstance(value, bool) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        limits = f"from {low} to {high}" if high != float("inf") else f"of {low} or more"
        raise UsageError(f"{name}: got {value!r}, expected {kind} {limits}")
    return int(value) if isinstance(value, Integral) else float(value)


def _plain(token_id: Any) -> Any:
    """numpy's whole numbers as Python's own."""
    if isinstance(token_id, bool):  # an Integral too, and a mistake
        return token_id
    return int(token_id) if isinstance(token_id, Integral) else token_id


def _checked_sequence(name: str, value: Any, kind: str) -> tuple[Any, ...]:
    """The items in a tuple. Raises ``UsageError`` for what is not several."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise UsageError(f"{name}: got {value!r}, expected a list of {kind}; put one alone into brackets")
    return tuple(value)


def options_of(given: Options) -> GenerationOptions:
    """The checked options of keyword arguments. Raises ``UsageError`` for a name that is none."""
    known = {field.name for field in fields(GenerationOptions)}
    for name in given:
        if name not in known:
            raise UsageError(f"{name}: not an option of a generation; expected some of {', '.join(sorted(known))}")
    return GenerationOptions(**given)
