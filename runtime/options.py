"""The options of a generation, each defined once: the command line, the keyword arguments and servers derive from it.

None means that the caller did not set the option. ``specrt.runtime.settings`` has the rules for its value then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, TypedDict, get_args, get_type_hints

from specrt.engines.errors import UsageError
from specrt.engines.interface import Array
from specrt.engines.samplers import BLOCK, MATCH, MAX_TOP_LOGPROBS, NUM_SORTED_WIDE
from specrt.runtime import checks, structured
from specrt.runtime.sampling.uniforms import MAX_SEED
from specrt.runtime.text.messages import ChatOptions

RULES = (MATCH, BLOCK)
DRAFTS = ("auto", "ngram", "model", "none")

# (prompt and output so far, with drafted ids; logits [V] f32, which may be changed in place) -> None, or new logits
LogitsProcessor = Callable[[Sequence[int], Array], Array | None]


class Options(TypedDict, total=False):
    """The keyword arguments of ``generate`` and ``stream``; see ``GenerationOptions``."""

    max_new_tokens: int
    min_new_tokens: int
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
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    visible_special_tokens: Sequence[str]
    ignore_eos: bool
    reproducible: bool | None
    model_defaults: bool
    logprobs: int | None
    logit_bias: Mapping[int, float] | None
    banned_token_ids: Sequence[int]
    logits_processors: Sequence[LogitsProcessor]
    json_schema: Mapping[str, Any] | bool | str | None
    regex: str | None
    grammar: str | None
    json_object: bool
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_name: str | None
    add_generation_prompt: bool | None
    continue_final_message: bool | str


def _option(default: Any, help: str, **row: Any) -> Any:
    """A field of ``GenerationOptions`` with the attributes of its ``Option``."""
    return field(default=default, metadata={"help": help, **row})


@dataclass(frozen=True)
class GenerationOptions:
    """The options of one generation, checked. Raises ``UsageError`` for a value out of its range.

    * ``max_new_tokens``: the maximum number of new tokens. ``min_new_tokens``: no EOS, stop id or stop string ends the
      text earlier.
    * ``num_speculative_tokens``: K, 0 for plain decoding. ``draft``: ``ngram``, ``model``, ``none``, or ``auto``, which
      takes the fastest in each round. Without a K it is chosen in each round, up to the bundle's
      (``specrt.runtime.drafting.adaptive``).
    * ``rule``: ``match`` or ``block``.
    * ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    * ``seed``: with rule ``match``, the text depends on seed and target only, and is the same for every draft and K.
      With ``rule="block"`` it is the same for the same draft and K.
    * ``repetition_penalty`` divides (or multiplies) the logits of ids that occur in prompt or output.
      ``presence_penalty`` and ``frequency_penalty`` are subtracted for ids of the output, once or for each occurrence.
    * ``logit_bias`` is added to the logits of an id; ``banned_token_ids`` cannot be generated.
    * ``logits_processors``: Python callables, applied in turn after the penalties, to target and draft. They only see
      prefixes that they allow, must depend on their arguments alone, and copy the logits to the host and back.
    * ``json_schema`` (a dict, or JSON text), ``regex``, ``grammar`` (in llguidance's Lark) or ``json_object`` (any JSON
      object): the format of the whole text (``specrt.runtime.sampling.grammar``). At most one of them.
    * ``stop``: strings that end the text and are not part of it; ``stop_token_ids``: ids that end it as EOS does.
    * ``logprobs``: the log-probability of each emitted token, with those of this many of the target's most likely ids.
    * ``visible_special_tokens``: special tokens that are part of the text, such as the marker of a tool call.
    * ``reproducible``: every pass has at least two rows, so that logits are bit-identical for every K and draft.
    * ``model_defaults``: options that are not given are taken from the model's generation config.
    * ``chat_template_kwargs``, ``tools``, ``add_generation_prompt``, ``continue_final_message`` and
      ``chat_template_name``: how messages become text (``specrt.runtime.text.messages.ChatOptions``).
    """

    max_new_tokens: int = _option(256, "Maximum number of new tokens.")
    min_new_tokens: int = _option(0, "Minimum number of new tokens.")
    num_speculative_tokens: int | None = _option(None, "K; 0 is plain decoding.", otherwise="the bundle's")
    draft: str | None = _option(None, "Where drafts come from.", otherwise="the bundle's own", choices=DRAFTS)
    rule: str | None = _option(
        None,
        "How drafts are verified.",
        otherwise="block where the draft samples, else match",
        choices=RULES,
    )
    temperature: float | None = _option(None, "0 is greedy.", neutral=0.0, high=100)
    top_k: int | None = _option(None, "Keep the k most likely tokens; 0 keeps all.", neutral=0, high=NUM_SORTED_WIDE)
    top_p: float | None = _option(None, "Keep the top tokens that reach this probability.", neutral=1.0, high=1)
    min_p: float | None = _option(None, "Drop tokens below this share of the top probability.", neutral=0.0, high=1)
    seed: int | None = _option(
        None, "Makes the text depend on this and the target alone, not on draft and K.", high=MAX_SEED
    )
    repetition_penalty: float | None = _option(
        None, "Divides the logits of tokens that occurred.", neutral=1.0, check=checks.penalty_factor
    )
    presence_penalty: float | None = _option(
        None, "Subtracted from the logits of generated tokens.", neutral=0.0, low=-100, high=100
    )
    frequency_penalty: float | None = _option(None, "The same, once per occurrence.", neutral=0.0, low=-100, high=100)
    stop: str | Sequence[str] = _option((), "End before this text.", check=checks.stops)
    stop_token_ids: Sequence[int] = _option((), "End with this token, like EOS.", check=checks.token_ids)
    visible_special_tokens: Sequence[str] = _option(
        (), "Special tokens whose names are part of the text.", check=checks.texts
    )
    ignore_eos: bool = _option(False, "Do not stop at the end-of-sequence tokens.")
    reproducible: bool | None = _option(None, "Bit-identical logits for every draft and K.")
    model_defaults: bool = _option(False, "Use the model's generation config for options not given.")
    logprobs: int | None = _option(None, "Log-probabilities of tokens and N others.", high=MAX_TOP_LOGPROBS)
    logit_bias: Mapping[int, float] | None = _option(None, "Added to the logits of a token.", check=checks.biases)
    banned_token_ids: Sequence[int] = _option((), "Never generated.", check=checks.token_ids)
    logits_processors: Sequence[LogitsProcessor] = _option((), "Change logits in Python.", check=checks.processors)
    json_schema: Mapping[str, Any] | bool | str | None = _option(
        None, "The text is JSON of this schema.", check=structured.schema_text
    )
    regex: str | None = _option(None, "The text matches this regular expression.", check=structured.pattern_text)
    grammar: str | None = _option(None, "The text follows this Lark grammar.", check=structured.lark_text)
    json_object: bool = _option(False, "The text is a JSON object.")
    chat_template_kwargs: Mapping[str, Any] | None = _option(
        None, "Variables of the chat template.", check=checks.of_template
    )
    tools: Sequence[Mapping[str, Any]] | None = _option(
        None, "A list of functions' schemas, for the chat template.", check=checks.of_template
    )
    chat_template_name: str | None = _option(
        None, "The chat template, where the model has several.", check=checks.of_template
    )
    add_generation_prompt: bool | None = _option(
        None,
        "End the prompt with the beginning of an answer.",
        otherwise="unless a message is continued",
        check=checks.of_template,
    )
    continue_final_message: bool | str = _option(
        False, "Continue the last message, the assistant's.", check=checks.of_template
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.checked(getattr(self, name)))
        if self.min_new_tokens > self.max_new_tokens:
            raise UsageError(
                f"min_new_tokens: got {self.min_new_tokens}, expected at most max_new_tokens ({self.max_new_tokens})"
            )
        _ = self.chat, self.structure

    @property
    def structure(self) -> structured.Grammar | None:
        """The grammar of the text, if one is given. Raises ``UsageError`` for several."""
        schema: Any = self.json_schema
        return structured.grammar_of(schema, self.regex, self.grammar, self.json_object)

    @property
    def chat(self) -> ChatOptions:
        """The options of the chat template. Raises ``UsageError`` for a combination that is not valid."""
        return ChatOptions(**{f.name: getattr(self, f.name) for f in fields(ChatOptions) if f.init})


@dataclass(frozen=True)
class Option:
    """The type, range, default and one-sentence help of an option.

    ``default`` None: not set. The value is then the model's or the bundle's, else ``neutral`` or what ``otherwise``
    describes. A number must be from ``low`` to ``high``, a string one of ``choices``. For other types ``check(name,
    value)`` returns the value to store.
    """

    name: str
    type: Any  # of a value that is set
    default: Any
    help: str
    neutral: Any = None
    otherwise: str = ""
    low: float = 0
    high: float = float("inf")
    choices: tuple[str, ...] = ()
    check: Callable[[str, Any], Any] | None = None

    def checked(self, value: Any) -> Any:
        """The value to store. Raises ``UsageError`` that names the option."""
        if value is None and self.default is None:
            return None
        if self.check is not None:
            return self.check(self.name, value)
        if self.choices:
            return checks.choice(self.name, value, self.choices)
        if self.type is bool:
            return checks.flag(self.name, value)
        return checks.number(self.name, value, self.low, self.high, whole=self.type is int)


def _without_none(kind: Any) -> Any:
    given = [arg for arg in get_args(kind) if arg is not NoneType]
    return given[0] if NoneType in get_args(kind) and len(given) == 1 else kind


_TYPES = get_type_hints(GenerationOptions)
OPTIONS: Mapping[str, Option] = {
    f.name: Option(f.name, _without_none(_TYPES[f.name]), f.default, **f.metadata) for f in fields(GenerationOptions)
}


def option_named(name: str) -> Option:
    """The option of that name. Raises ``UsageError`` if there is none."""
    if name not in OPTIONS:
        raise UsageError(f"{name}: not an option of a generation; expected some of {', '.join(sorted(OPTIONS))}")
    return OPTIONS[name]


def checked(name: str, value: Any) -> Any:
    """The value to store for option ``name``. Raises ``UsageError`` that names the option."""
    return option_named(name).checked(value)


def neutral(name: str) -> Any:
    """The value of option ``name`` if neither the caller, the model nor the bundle sets it."""
    option = OPTIONS[name]
    return option.neutral if option.default is None else option.default


def options_of(given: Options) -> GenerationOptions:
    """The checked options of keyword arguments. Raises ``UsageError`` for an unknown name."""
    for name in given:
        option_named(name)
    return GenerationOptions(**given)
