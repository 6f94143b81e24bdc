"""Bodies of ``/v1/chat/completions`` and ``/v1/completions``, checked field by field. No field is silently ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specrt.engines.errors import UsageError
from specrt.engines.samplers import MAX_TOP_LOGPROBS
from specrt.runtime.text.codec import Prompt
from specrt.runtime.text.messages import ChatOptions
from specrt.serving.protocol.errors import ApiError, invalid, refused
from specrt.serving.protocol.fields import Fields
from specrt.serving.protocol.messages import messages_of
from specrt.serving.protocol.structure import Structure, structure_of
from specrt.serving.protocol.tool_fields import ToolUse, tool_use_of

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MAX_PENALTY = 2

# Fields that are runtime options; the runtime checks their values
_OPTIONS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")},
    **{name: name for name in ("num_speculative_tokens", "draft", "rule")},
    "min_tokens": "min_new_tokens",
}
_UNSUPPORTED = {
    **{f"guided_{name}": f"use structured_outputs.{name}" for name in ("json", "regex", "grammar", "choice")},
    **dict.fromkeys(("functions", "function_call"), "it is deprecated; use tools and tool_choice"),
}


@dataclass(frozen=True)
class Defaults:
    """Defaults of a request: ``sampling`` by the runtime's option names, and ``reproducible``."""

    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": 1.0})
    reproducible: bool | None = None


@dataclass(frozen=True)
class Wanted:
    """A parsed request. ``options`` are keyword arguments of ``Runtime.stream``, ``chat`` those of the chat template.

    Without ``max_tokens`` a text may fill the context. ``timings``, ``rounds`` and ``token_ids`` request extensions of
    OpenAI's API.
    """

    prompts: Sequence[Prompt]
    options: Mapping[str, Any]
    is_chat: bool
    chat: ChatOptions | None = None
    tools: ToolUse | None = None
    structure: Structure | None = None
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    timings: bool = False
    rounds: bool = False
    token_ids: bool = False


def chat_request(body: Any, defaults: Defaults) -> Wanted:
    """A body of ``/v1/chat/completions``. Raises ``ApiError``."""
    fields = Fields(body)
    messages = messages_of(fields)
    tools = tool_use_of(fields)
    chat = chat_options(fields, tools)
    asked, completion = _max_tokens(fields, "max_tokens"), _max_tokens(fields, "max_completion_tokens")
    if asked is not None and completion is not None and asked != completion:
        raise invalid("max_completion_tokens", f"got {completion}, and max_tokens {asked}; give one of the two")
    structure = structure_of(fields)
    if structure is not None and tools is not None and not structure.is_json:
        raise invalid(structure.param, "got it with tools, whose calls it may not allow; set tool_choice to none")
    options = _options(fields, defaults)
    options.update(_chat_logprobs(fields))
    common = _common(fields)
    _check_choices(common["n"], 1)
    fields.end()
    max_tokens = completion if asked is None else asked
    return Wanted([messages], options, True, chat, tools, structure, max_tokens, **common)


def completion_request(body: Any, defaults: Defaults) -> Wanted:
    """A body of ``/v1/completions``. Raises ``ApiError``."""
    fields = Fields(body)
    prompts = _prompts(fields)
    max_tokens = fields.whole("max_tokens", -1)
    echo = fields.flag("echo")
    logprobs = fields.whole("logprobs", 0, MAX_TOP_LOGPROBS)
    if echo and logprobs is not None:
        raise invalid("echo", "got it with logprobs, and those of a prompt are not supported; leave one out")
    structure = structure_of(fields)
    options = {**_options(fields, defaults), "logprobs": logprobs}
    common = _common(fields)
    best_of = fields.whole("best_of", 1)
    if best_of not in (None, common["n"]):
        raise invalid("best_of", f"got {best_of}, expected it to equal n ({common['n']}); leave it out")
    fields.refuse({"suffix": "text is only generated after a prompt"})
    _check_choices(common["n"], len(prompts))
    fields.end()
    max_tokens = 16 if max_tokens is None else None if max_tokens == -1 else max_tokens
    return Wanted(prompts, options, False, structure=structure, max_tokens=max_tokens, echo=echo, **common)


def _max_tokens(fields: Fields, name: str) -> int | None:
    """A limit of one or more; None without one, which is llama.cpp's -1 too."""
    value = fields.whole(name, -1)
    if value == 0:
        raise fields.wrong(name, value, "1 or more")
    return None if value == -1 else value


def _common(fields: Fields) -> dict[str, Any]:
    """Fields of both endpoints that are not options of a generation."""
    _take_without_effect(fields)
    fields.take("model")  # checked before
    fields.refuse(_UNSUPPORTED)
    stream = fields.flag("stream")
    given = fields.take("stream_options")
    include_usage = False
    if given is not None:
        if not stream:
            raise invalid("stream_options", "got it without stream; leave it out, or set stream")
        stream_options = Fields(given, "stream_options")
        include_usage = stream_options.flag("include_usage")
        stream_options.one_of("include_obfuscation", (False,))
        stream_options.end()
    n = fields.whole("n", 1, MAX_CHOICES)
    return {
        "stream": stream,
        "include_usage": include_usage,
        "n": 1 if n is None else n,
        "timings": fields.flag("timings_per_token"),
        "rounds": fields.flag("return_rounds"),
        "token_ids": fields.flag("return_token_ids"),
    }


def _check_choices(n: int, num_prompts: int) -> None:
    if n * num_prompts > MAX_CHOICES:
        name = "n" if n > 1 else "prompt"
        raise invalid(name, f"got {n} choices for {num_prompts} prompts, expected at most {MAX_CHOICES} in all")


def _take_without_effect(fields: Fields) -> None:
    """Fields that are accepted and have no effect."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        fields.text(name)
    fields.of_kind("metadata", dict, "an object")
    fields.one_of("store", (False,))
    fields.one_of("service_tier", ("auto", "default"))


def _options(fields: Fields, defaults: Defaults) -> dict[str, Any]:
    options: dict[str, Any] = dict(defaults.sampling)
    if defaults.reproducible is not None:
        options["reproducible"] = defaults.reproducible
    given = {option: fields.take(name) for name, option in _OPTIONS.items()}
    options.update({option: value for option, value in given.items() if value is not None})
    if options.get("top_k") == -1:  # vLLM's value for all tokens
        options["top_k"] = 0
    if options.get("seed") == -1:  # vLLM's and llama.cpp's value for none
        del options["seed"]
    for name in ("presence_penalty", "frequency_penalty"):
        value = fields.of_kind(name, (int, float), f"a number from -{MAX_PENALTY} to {MAX_PENALTY}")
        if value is not None:
            if not abs(value) <= MAX_PENALTY:
                raise fields.wrong(name, value, f"a number from -{MAX_PENALTY} to {MAX_PENALTY}")
            options[name] = value
    options["stop"] = _stops(fields)
    if (ids := fields.of_kind("stop_token_ids", list, "a list of token ids")) is not None:
        options["stop_token_ids"] = ids
    options["ignore_eos"] = fields.flag("ignore_eos")
    if (bias := _logit_bias(fields)) is not None:
        options["logit_bias"] = bias
    return options


def _stops(fields: Fields) -> list[str]:
    value = fields.take("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise fields.wrong("stop", value, "a string or a list of strings, none of them empty")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise invalid("stop", f"expected at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    return stops


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    given = fields.of_kind("logit_bias", dict, "an object {token id: bias}")
    if given is None:
        return None
    for name, bias in given.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (name.isascii() and name.isdigit() and len(name) < 10 and is_number and abs(bias) <= 100):
            raise fields.wrong("logit_bias", {name: bias}, "token ids with a bias from -100 to 100")
    return {int(name): bias for name, bias in given.items()} or None


def _chat_logprobs(fields: Fields) -> dict[str, Any]:
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "got it without logprobs; set logprobs to true")
    return {"logprobs": (top or 0) if wanted else None}


def chat_options(fields: Fields, tools: ToolUse | None) -> ChatOptions:
    """The fields for the chat template. Raises ``ApiError``."""
    variables = fields.of_kind("chat_template_kwargs", dict, "an object {name: value}")
    continues = fields.flag("continue_final_message")
    adds = fields.of_kind("add_generation_prompt", bool, "true or false")
    try:
        return ChatOptions(variables, tools.schemas if tools else None, adds if adds is not None else None, continues)
    except UsageError as error:
        option, given = str(error).partition(": ")[0], "chat_template_kwargs"
        raise refused(error, {option: f"{given}.{option}"} if option in (variables or {}) else None) from error


def _prompts(fields: Fields) -> list[Prompt]:
    """A text, ids, or a list of either."""
    given = fields.take("prompt")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise _wrong_prompt(fields, given)
    if all(map(_is_id, given)):
        return [given]
    if all(isinstance(prompt, str) for prompt in given):
        return list(given)
    if all(isinstance(prompt, list) and prompt and all(map(_is_id, prompt)) for prompt in given):
        return list(given)
    raise _wrong_prompt(fields, given)


def _wrong_prompt(fields: Fields, value: Any) -> ApiError:
    return fields.wrong("prompt", value, "a string, a list of token ids, or a list of either, not empty")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
