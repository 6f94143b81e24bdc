"""Middleware for every request: API keys, and a log line without contents."""

from __future__ import annotations

import hmac
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrt.engines.errors import UsageError
from specrt.serving.protocol.errors import ApiError

_LOG = logging.getLogger(__name__)
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#@]+")
_PROTECTED = ("/v1", "/tokenize", "/detokenize")


def keys_from_file(path: Path) -> list[bytes]:
    """The keys of a file with one per line. Raises ``UsageError`` if it has none."""
    keys = [line.strip() for line in path.read_bytes().splitlines()]
    if not any(keys):
        raise UsageError(f"--api-key-file: {path} has no key; write one per line")
    return [key for key in keys if key]


def checked_origins(origins: Sequence[str]) -> list[str]:
    """Origins as browsers send them, or ``*``. Raises ``UsageError`` for anything else."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise UsageError(f"--cors-origin: got {origin!r}, expected '*' or an origin such as http://localhost:3000")
    return [origin.lower() for origin in origins]


def route_path(scope: Scope) -> str:
    """The path of a request below the prefix, if any, that the application is mounted under."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


class Guard:
    """ASGI middleware. With ``keys``, API requests need one of them; the page, ``/health`` and ``/metrics`` do not."""

    def __init__(self, app: ASGIApp, keys: Sequence[bytes] = ()) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request or pass it on, then log it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._keys and route_path(scope).startswith(_PROTECTED) and not self._knows(Headers(scope=scope)):
                await _unauthorized()(scope, receive, noting)
            else:
                await self._app(scope, receive, noting)
        finally:
            self._log(scope, status, time.perf_counter() - started)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1", "replace")
        known = [hmac.compare_digest(given, key) for key in self._keys]  # compares with all, in constant time
        return scheme.lower() == "bearer" and any(known)

    @staticmethod
    def _log(scope: Scope, status: int, seconds: float) -> None:
        prompt, completion = scope.get("specrt_tokens", (None, None))
        tokens = "" if prompt is None else f" prompt_tokens={prompt} completion_tokens={completion}"
        left = " client left" if scope.get("specrt_cancelled") else ""
        path = scope["path"].encode("unicode_escape").decode()
        _LOG.info("%s %s %s %.0f ms%s%s", scope["method"], path, status or "-", seconds * 1e3, tokens, left)


def _unauthorized() -> JSONResponse:
    error = ApiError(401, "no valid API key: send 'Authorization: Bearer KEY'", None, "invalid_api_key")
    return JSONResponse(error.as_dict(), 401, error.headers)
