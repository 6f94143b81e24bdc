"""Request bodies: JSON with a limit on size and on the time to read it."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from specrt.serving.protocol.errors import ApiError
from specrt.serving.protocol.fields import parsed

BODY_TIMEOUT_S = 30.0


async def json_body(request: Request, max_bytes: int) -> Any:
    """The parsed JSON body of a request. Raises ``ApiError`` 400, 408, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type: got {kind!r}, expected application/json")
    data = await raw_body(request, max_bytes)
    try:
        return parsed(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {' '.join(str(error).split())}") from error


async def raw_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request. Raises ``ApiError`` 400, 408 or 413."""
    try:
        return await asyncio.wait_for(_body(request, max_bytes), BODY_TIMEOUT_S)
    except asyncio.TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="timeout") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the body is not complete") from error


async def _body(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise too_large
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > max_bytes:
            raise too_large
    return bytes(data)
