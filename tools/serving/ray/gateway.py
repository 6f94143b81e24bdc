"""The gateway: takes requests for all replicas, and sends each to the one that its routing key belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from specrt.serving.app import guarded
from specrt.serving.bodies import raw_body
from specrt.serving.guard import route_path
from specrt.serving.protocol.errors import too_busy, unavailable
from specrt.serving.protocol.responses import event
from specrt.serving.protocol.routing import routing_key

_LOG = logging.getLogger(__name__)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "query_string", "headers", "client", "server")


@serve.ingress()
class Gateway:
    """The deployment's class. ``engine`` is the handle of the replicas."""

    def __init__(self, engine: Any, keys: Sequence[bytes], max_body_bytes: int) -> None:
        self._engine = engine.options(stream=True, method_name="http")
        self._all, self._keys, self._max_body_bytes = engine, keys, max_body_bytes

    def __serve_build_asgi_app__(self) -> Starlette:
        return guarded(
            [Route("/metrics", self._metrics), Route("/{path:path}", self._forward, methods=_METHODS)], self._keys
        )

    async def _forward(self, request: Request) -> Any:
        body = await raw_body(request, self._max_body_bytes)
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        path = route_path(request.scope)
        scope |= {"path": path, "raw_path": path.encode(), "root_path": ""}
        key = routing_key(request.headers, body)
        return Relay(lambda: self._engine.options(session_id=key).remote(scope, body))

    async def _metrics(self, request: Request) -> Response:
        replies = await self._all.broadcast("metrics").results_async(timeout_s=10)
        return Response(merged(replies), media_type=CONTENT_TYPE_LATEST)


class Relay:
    """An ASGI response: the messages of a replica."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them. Ray Serve cancels this when the client leaves, which ends the request in the replica."""
        is_begun = is_stream = is_whole = False
        messages = self._ask()
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    is_begun = True
                    is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                await send(message)
            is_whole = True
        except (RayActorError, BackPressureError, DeploymentUnavailableError) as error:
            _LOG.warning("a replica did not answer: %s", error)
            failure = too_busy() if isinstance(error, BackPressureError) else unavailable("short of a replica")
            if not is_begun:
                raise failure from error
            if not is_stream:
                raise  # the length of the body is not what was promised, so the connection has to be closed
            await send({"type": "http.response.body", "body": event(failure.as_dict())})
        finally:
            if not is_whole:
                messages.cancel()


class _Collected(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def merged(replies: Iterable[list[Metric]]) -> bytes:
    """The text of the metrics of several replicas."""
    by_name: dict[str, Metric] = {}
    for metric in (metric for reply in replies for metric in reply):
        by_name.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        by_name[metric.name].samples += metric.samples
    registry = CollectorRegistry()
    registry.register(_Collected(list(by_name.values())))
    return generate_latest(registry)
