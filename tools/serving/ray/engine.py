"""A replica: the application of ``specrt serve`` on a bundle of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from prometheus_client import Metric
from ray import serve
from starlette.types import Message, Scope

from specrt.engines.errors import BackendError
from specrt.serving.app import create_app
from specrt.serving.source import Source

_LOG = logging.getLogger(__name__)
REPLICA_HEADER = "x-specrt-replica"


class Engine:
    """The deployment's class."""

    def __init__(self, source: Source) -> None:
        self._service = source.open()
        self._app = create_app(self._service)
        self._name: str = serve.get_replica_context().replica_tag

    def check_health(self) -> None:
        """Raises when the engine's thread has failed; Ray Serve then replaces the replica."""
        if not self._service.scheduler.is_alive:
            raise BackendError("the engine's thread has ended; the log has the reason")

    def __del__(self) -> None:
        """Called by Ray Serve when the replica's requests have ended, or its time to drain has passed."""
        if hasattr(self, "_service"):
            self._service.close()

    async def http(self, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """The ASGI messages of the response to a request. Ending the iteration is as a client that leaves."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        requests: asyncio.Queue[Message] = asyncio.Queue()
        requests.put_nowait({"type": "http.request", "body": body, "more_body": False})
        answering = asyncio.ensure_future(self._app(scope, requests.get, messages.put))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (REPLICA_HEADER.encode(), self._name.encode())]
                yield message
        finally:
            requests.put_nowait({"type": "http.disconnect"})
            await asyncio.wait([answering])
            if not answering.cancelled() and (error := answering.exception()) is not None:
                _LOG.error("a request failed", exc_info=error)

    async def metrics(self) -> list[Metric]:
        """What ``/metrics`` shows, with the label ``replica``."""
        found = list(self._service.metrics.collect())
        for metric in found:
            metric.samples = [s._replace(labels={**s.labels, "replica": self._name}) for s in metric.samples]
        return found
