"""The response to a request, whole or as server-sent events. It is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from specrt.engines.errors import UsageError
from specrt.runtime.stream import Step
from specrt.serving.protocol.choices import Choice, Delta
from specrt.serving.protocol.errors import ApiError, internal, timed_out, unavailable
from specrt.serving.protocol.requests import Wanted
from specrt.serving.protocol.responses import DONE, Answer, encoded, event
from specrt.serving.scheduler import DeadlinePassed, Draining
from specrt.serving.service import Job, Service
from specrt.serving.structures import refused_request

_LOG = logging.getLogger(__name__)
_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_SSE_HEADERS += [(b"x-accel-buffering", b"no")]
_JSON = (b"content-type", b"application/json")

# After the first chunk is sent: a client on this machine reads it before the next pass takes all cores.
_CLIENT_S = 0.0004
_SECONDS_TO_READ = 10.0  # for a client that reads slowly, after the deadline of its request


class ClientLeft(Exception):
    """The client has closed the connection."""


class Exchange:
    """An ASGI response: queues ``job`` and sends its output. Raises ``ApiError`` if the queue does not take it."""

    def __init__(self, service: Service, wanted: Wanted, job: Job) -> None:
        self._service, self._wanted, self._job = service, wanted, job
        if not wanted.stream:
            job.first_sent.set()
        self._answer = Answer(wanted, service.model_name, service.fingerprint, job.num_prompt_tokens)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. Starlette detects a disconnect only in streams, so it is done here for both kinds."""
        answering = asyncio.ensure_future(self._stream(send) if self._wanted.stream else self._whole(send))
        leaving = asyncio.ensure_future(_until_disconnect(receive))
        seconds_left = self._job.deadline - time.monotonic()
        late = asyncio.get_running_loop().call_later(seconds_left, self._job.reports.put_nowait, (0, DeadlinePassed()))
        try:
            # Both tasks wait after this, so that the event loop takes no time from the engine's pass
            await asyncio.sleep(0)
            self._service.submit(self._job)
            try:
                await self._first_of(answering, leaving, seconds_left + _SECONDS_TO_READ)
            except (ClientLeft, OSError):
                self._service.metrics.count("request_cancelled")
                scope["specrt_cancelled"] = True
            finally:
                self._service.metrics.observe("e2e_request_latency_seconds", time.monotonic() - self._job.arrived)
                scope["specrt_tokens"] = (self._job.num_prompt_tokens, sum(c.num_tokens for c in self._job.choices))
        finally:
            self._job.first_sent.set()
            late.cancel()
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
            self._service.scheduler.cancel(self._job.generations)

    @staticmethod
    async def _first_of(answering: asyncio.Task[None], leaving: asyncio.Task[None], timeout_s: float) -> None:
        await asyncio.wait((answering, leaving), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientLeft
        await answering

    async def whole(self) -> tuple[int, dict[str, Any]]:
        """Queue the job; the answer that is not streamed: (status, body). Raises ``ApiError`` as a call does."""
        self._service.submit(self._job)
        return await self._collected()

    async def _collected(self) -> tuple[int, dict[str, Any]]:
        deltas = {choice.index: Delta() for choice in self._job.choices}
        try:
            async for choice, delta in self._deltas():
                deltas[choice.index] += delta
        except ApiError as error:
            return error.status, error.as_dict()
        return 200, self._answer.whole(self._job.choices, deltas)

    async def _whole(self, send: Send) -> None:
        status, answer = await self._collected()
        body = encoded(answer)
        headers = [_JSON, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        """The status is sent with the first chunk, so that an earlier error gets its own status."""
        is_begun = False
        try:
            async for choice, delta in self._deltas():
                data = b"".join(map(event, self._answer.chunks(choice, delta)))
                if data and not is_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                    is_begun = True
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if delta.token_ids and not self._job.first_sent.is_set():
                    asyncio.get_running_loop().call_later(_CLIENT_S, self._job.first_sent.set)
            last = event(self._answer.usage_chunk(self._job.choices)) if self._wanted.include_usage else b""
        except ApiError as error:
            last = event(error.as_dict())
            if not is_begun:
                body = encoded(error.as_dict())
                await send({"type": "http.response.start", "status": error.status, "headers": [_JSON]})
                await send({"type": "http.response.body", "body": body})
                return
        await send({"type": "http.response.body", "body": last + DONE})

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """The additions of rounds to the choices, until all have ended. Raises ``ApiError``."""
        job, timeout_s = self._job, self._service.config.limits.request_timeout_s
        num_left = len(job.choices)
        while num_left:
            index, outcome = await job.reports.get()
            choice = job.choices[index]
            if isinstance(outcome, DeadlinePassed):
                raise timed_out(timeout_s)
            if isinstance(outcome, Draining):
                raise unavailable("draining")
            was_ended = choice.finish_reason is not None
            if was_ended:
                continue  # early, and this was on its way
            if isinstance(outcome, UsageError):  # no id is left that the grammar allows
                raise refused_request(outcome, self._wanted, self._service.runtime)
            if isinstance(outcome, BaseException):
                _LOG.error("a generation failed", exc_info=outcome)
                raise internal(outcome)
            delta = choice.add(outcome) if isinstance(outcome, Step) else choice.end()
            if choice.finish_reason is not None:
                num_left -= 1
                self._service.scheduler.cancel([job.generations[index]])
            yield choice, delta


async def _until_disconnect(receive: Receive) -> None:
    with suppress(RuntimeError):
        while (await receive())["type"] != "http.disconnect":
            pass
