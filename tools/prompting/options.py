"""The options of ``generate`` and ``chat``, their conversion to ``specrt.runtime.options``, and printed settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from rich.console import Console
from rich.table import Table

from specrt.engines.errors import UsageError
from specrt.engines.interface import DEVICES
from specrt.engines.manifest import TokenizerEntry
from specrt.runtime.options import OPTIONS, Option, Options, neutral
from specrt.runtime.settings import Settings
from specrt.tools.prompting.grammar_files import text_or_file
from specrt.tools.prompting.stop_strings import unescaped
from specrt.tools.prompting.textfiles import parsed_json, read_text, without_final_newline
from specrt.tools.terminal.options import THREADS

_Command = TypeVar("_Command", bound=Callable[..., Any])


def generation_option(name: str, *flags: str, more: str = "", **changes: Any) -> Callable[[_Command], _Command]:
    """The click option of option ``name`` of a generation; ``more`` is what a command line has to say of it."""
    option = OPTIONS[name]
    attributes: dict[str, Any] = {"help": f"{option.help} {more}".strip() + _default_text(option)}
    if option.choices:
        attributes["type"] = click.Choice(option.choices)
    elif option.type is bool:
        attributes |= {"is_flag": True, "default": option.default}
    elif option.type in (int, float):
        attributes |= {"type": option.type, "default": option.default}
    return click.option(*(flags or [f"--{name.replace('_', '-')}"]), name, **{**attributes, **changes})


def _default_text(option: Option) -> str:
    default = neutral(option.name)
    text = option.otherwise or (f"{default:g}" if option.type in (int, float) and default is not None else "")
    return f"  [default: {text}]" if text else ""


_GENERATION = (
    *map(generation_option, ("max_new_tokens", "min_new_tokens")),
    generation_option("num_speculative_tokens", "--num-speculative-tokens", "-k"),
    *map(generation_option, ("draft", "rule", "temperature", "top_k", "top_p", "min_p", "seed")),
    *map(generation_option, ("repetition_penalty", "presence_penalty", "frequency_penalty")),
    generation_option(
        "stop",
        more="May be given several times; escapes: \\n, \\t, \\\\, \\uXXXX.",
        multiple=True,
        metavar="TEXT",
        callback=lambda context, option, texts: [unescaped(text) for text in texts],
    ),
    generation_option("stop_token_ids", "--stop-token-id", more="May be given several times.", multiple=True, type=int),
    *(
        generation_option(
            name,
            more="A file, or the text itself.",
            metavar="FILE|TEXT",
            callback=lambda context, option, text: None if text is None else text_or_file(text),
        )
        for name in ("json_schema", "regex", "grammar")
    ),
    *map(generation_option, ("json_object", "ignore_eos", "reproducible", "model_defaults")),
    generation_option(
        "chat_template_kwargs",
        more="Such as '{\"enable_thinking\": false}'.",
        metavar="JSON",
        callback=lambda context, option, text: None if text is None else _template_kwargs(text),
    ),
    generation_option(
        "tools",
        more="From a JSON file.",
        metavar="FILE",
        type=click.Path(path_type=Path),
        callback=lambda context, option, file: None if file is None else _tools(file),
    ),
    generation_option("chat_template_name", metavar="NAME"),
)
_PLACE = (
    click.option("--backend", help="One of the bundle's, or onnxruntime-rtx for onnxruntime's.  [default: its first]"),
    click.option("--device", type=click.Choice(DEVICES), help="[default: cpu; cuda with all but onnxruntime]"),
    click.option("--draft-backend", help="The draft's.  [default: --backend]"),
    click.option("--draft-device", type=click.Choice(DEVICES), help="The draft's.  [default: --device]"),
    THREADS,
)


def generation_options(command: _Command) -> _Command:
    """Add the options of a generation to a click command."""
    for option in reversed(_GENERATION):
        command = option(command)
    return command


def place_options(command: _Command) -> _Command:
    """Add the backend and device options to a click command."""
    for option in reversed(_PLACE):
        command = option(command)
    return command


def place_of(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the backend and device options from ``options``; return them as keyword arguments of ``specrt.load``."""
    return {name: options.pop(name) for name in ("backend", "threads", "device", "draft_backend", "draft_device")}


def options_from_command(values: dict[str, Any]) -> Options:
    """The options that were given, as keyword arguments of ``generate``."""
    return cast(Options, {name: value for name, value in values.items() if value is not None})


def print_settings(settings: Settings) -> None:
    """Print the effective settings and their sources on standard error."""
    table = Table(title="effective settings", title_justify="left")
    for heading in ("setting", "value", "from"):
        table.add_column(heading)
    for name, entry in settings.as_dict().items():
        table.add_row(name, str(entry["value"]), entry["source"])
    Console(stderr=True).print(table, markup=False)


def _template_kwargs(text: str) -> dict[str, Any]:
    expected = 'an object such as {"enable_thinking": false}'
    parsed = parsed_json(text, "--chat-template-kwargs", expected)
    if not isinstance(parsed, dict):
        raise UsageError(f"--chat-template-kwargs: got {type(parsed).__name__}, expected {expected}")
    return parsed


def _tools(file: Path) -> list[dict[str, Any]]:
    return _list_of_objects(read_text(file), str(file), "a list of functions' JSON schemas")


def _list_of_objects(text: str, name: str, expected: str) -> list[dict[str, Any]]:
    parsed = parsed_json(text, name, expected)
    if not isinstance(parsed, list) or not all(isinstance(item, dict) for item in parsed):
        raise UsageError(f"{name}: got {type(parsed).__name__}, expected {expected}")
    return parsed


@dataclass(frozen=True)
class GivenPrompt:
    """The prompt of a command line: text, or messages from a file. ``raw``: text is plain text in every bundle."""

    content: str | list[dict[str, Any]]
    raw: bool
    system: str | None

    def for_bundle(self, entry: TokenizerEntry) -> tuple[str | list[dict[str, Any]], str]:
        """(the prompt for the runtime, a description of it). Raises ``UsageError``.

        Text is a user's message where the bundle has a chat template; ``system`` goes before it.
        """
        has_template = bool(entry.templates)
        if self.raw:
            return self.content, "plain text (--raw)"
        if self.system is not None and not has_template:
            raise UsageError("--system: the bundle has no chat template, so there are no messages; leave it out")
        if isinstance(self.content, str) and not has_template:
            return self.content, "plain text (the bundle has no chat template)"
        is_text = isinstance(self.content, str)
        messages = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content
        if self.system is not None:
            if any(message.get("role") == "system" for message in messages):
                raise UsageError("--system: got a system message in --messages too; give one")
            messages = [{"role": "system", "content": self.system}, *messages]
        kind = "a user message in the bundle's chat template; --raw is plain text" if is_text else "messages"
        return messages, kind


def kind_of(prompt: str | list[dict[str, Any]]) -> str:
    """``text`` or ``messages``: the ``prompt_kind`` of ``--json``."""
    return "text" if isinstance(prompt, str) else "messages"


def prompt_of(
    text: str | None, file: Path | None, messages: Path | None, raw: bool = False, system: str | None = None
) -> GivenPrompt:
    """The prompt from exactly one of the first three. Raises ``UsageError``.

    A file, and standard input for the text ``-``, are read without a byte order mark and without one final newline.
    """
    given = [value for value in (text, file, messages) if value is not None]
    if len(given) != 1:
        raise UsageError(f"prompt: got {len(given)} of --prompt, --prompt-file and --messages, expected exactly one")
    for name, value in (("--system", system), ("--messages", messages)):
        if raw and value is not None:
            raise UsageError(f"--raw: got {name} too, but plain text has no messages; give one of the two")
    if messages is not None:
        parsed = _list_of_objects(read_text(messages), str(messages), "a list of {role, content} objects")
        return GivenPrompt(parsed, raw, system)
    content = text if text is not None and text != "-" else without_final_newline(read_text(file))
    if not content:
        raise UsageError("prompt: got no tokens, expected at least one; give a text that is not empty")
    return GivenPrompt(content, raw, system)
