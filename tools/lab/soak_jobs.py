"""What the clients of the soak ask for: plain, structured and tool requests, each with its text when it runs alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specrt
from specrt.engines.manifest import MANIFEST_NAME, FileEntry, manifest_from_bundle, manifest_text
from specrt.engines.storage.integrity import sha256_of
from specrt.serving.protocol.choices import Delta
from specrt.serving.protocol.requests import Defaults, chat_request, completion_request
from specrt.serving.protocol.responses import Answer
from specrt.serving.service import Config, Service

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_TEMPLATE = (
    "{# a call is written in <tool_call> #}{% for tool in tools or [] %}tool: {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
)
_PROMPTS = ("The quick brown fox", "def area(radius):", "In the morning the birds", "One, two, three", "Say hello.")
_WAYS: Sequence[dict[str, Any]] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "seed": 12, "top_p": 0.9},
    {"temperature": 0, "presence_penalty": 0.5},
)
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "note": {"type": "string", "maxLength": 12}},
    "required": ["city", "note"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in ("go", "tell")]
_STRUCTURED: Sequence[dict[str, Any]] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[a-f ]{5,30}"}},
    {"tools": _TOOLS},
    {"tools": _TOOLS, "tool_choice": "required"},
    {"tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "tell"}}},
)


@dataclass(frozen=True)
class Job:
    """A request: the path and the body; ``text`` is its answer (``joined``) without other requests."""

    path: str
    body: Mapping[str, Any]
    text: str


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """The text, and after it the tool calls, of a choice, of a message or of the deltas of a stream."""
    text = "".join(part.get("text") or part.get("content") or "" for part in parts)
    calls = (call["function"] for part in parts for call in part.get("tool_calls", ()))
    return text + "".join(call.get("name", "") + call.get("arguments", "") for call in calls)


def jobs_of(bundle: Path) -> list[Job]:
    """The requests, each with the text that it gets alone. The bundle's chat template must take tools."""
    with specrt.load(bundle) as runtime:
        service = Service(runtime, Config(["soak"], defaults=Defaults(reproducible=True)))
        try:
            return [Job(path, body, _alone(service, path, body)) for path, body in _requests()]
        finally:
            service.close()


def _requests() -> list[tuple[str, dict[str, Any]]]:
    plain: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": prompt, "max_tokens": 8 + 9 * number, **way})
        for number, prompt in enumerate(_PROMPTS)
        for way in _WAYS
    ]
    chat = {"messages": [{"role": "user", "content": _PROMPTS[-1]}], "max_tokens": 120}
    chats = [(CHAT, {**chat, **way, **fields}) for fields in _STRUCTURED for way in _WAYS[:2]]
    return plain + chats


def _alone(service: Service, path: str, body: Mapping[str, Any]) -> str:
    """The text of the only request: its stream, without a server and a scheduler."""
    wanted = (completion_request if path == COMPLETIONS else chat_request)(dict(body), service.config.defaults)
    (choice,), num_prompt_tokens = service.prepare(wanted)
    delta = Delta()
    for step in choice.stream.steps:
        delta += choice.add(step)
    delta += choice.end()
    answer = Answer(wanted, "soak", "", num_prompt_tokens).whole([choice], {0: delta})["choices"][0]
    return joined([answer.get("message", answer)])


def with_tools(bundle: Path, folder: Path) -> Path:
    """The bundle, or a copy at ``folder`` with a chat template that takes tools if the bundle's does not.

    The files of the copy are hard links where the file system allows it.
    """
    manifest = manifest_from_bundle(bundle)
    if any("tools" in (bundle / name).read_text(encoding="utf-8") for name in manifest.tokenizer.templates.values()):
        return bundle
    for name in manifest.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(bundle / name, folder / name)
        except OSError:
            shutil.copyfile(bundle / name, folder / name)
    template = folder / "soak_template.jinja"
    template.write_text(_TEMPLATE, encoding="utf-8")
    files = {**manifest.files, template.name: FileEntry(template.stat().st_size, sha256_of(template))}
    tokenizer = replace(manifest.tokenizer, chat_template=template.name, named_chat_templates={})
    text = manifest_text(replace(manifest, tokenizer=tokenizer, files=files))
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
    return folder
