"""Which of several servers a request goes to, so that it finds the KV cache of earlier ones with the same beginning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

SESSION_HEADER = "x-session-id"  # the name that Ray Serve uses too
PREFIX_CHARS = 1024


def routing_key(headers: Mapping[str, str], body: bytes) -> str:
    """The session of the header, else the request's ``prompt_cache_key``, else a hash of the prompt's beginning.

    Empty if the request has none of them: any server will do.
    """
    if session := headers.get(SESSION_HEADER):
        return f"session:{session}"
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    if cache_key := request.get("prompt_cache_key"):
        return f"cache:{cache_key}"
    prefix = _prefix(request)
    return f"prompt:{hashlib.sha256(prefix.encode(errors='replace')).hexdigest()}" if prefix else ""


def ranked(key: str, servers: Iterable[str]) -> list[str]:
    """``servers`` in the order of preference for ``key`` (rendezvous hashing).

    One that comes or goes changes the first choice of 1/N of the keys only.
    """
    return sorted(servers, key=lambda name: hashlib.sha256(f"{key}\n{name}".encode(errors="replace")).digest())


def _prefix(request: Mapping[str, Any]) -> str:
    """The first ``PREFIX_CHARS`` of what all turns of a conversation begin with.

    That is the tools and the messages up to the first of the user, or a prompt.
    """
    messages, prompt = request.get("messages"), request.get("prompt")
    if isinstance(messages, list) and messages:
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        num_first = roles.index("user") + 1 if "user" in roles else len(roles)
        return json.dumps([request.get("tools"), messages[:num_first]])[:PREFIX_CHARS]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # of several prompts the first
    if isinstance(prompt, list) and prompt:
        return json.dumps(prompt[: PREFIX_CHARS // 4])
    return prompt[:PREFIX_CHARS] if isinstance(prompt, str) else ""
