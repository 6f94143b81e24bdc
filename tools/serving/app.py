"""The ASGI application: routes of OpenAI's API and of vLLM's server, and the chat page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from specrt.serving.bodies import json_body
from specrt.serving.exchange import Exchange
from specrt.serving.guard import Guard, route_path
from specrt.serving.protocol.errors import ApiError, internal, unavailable
from specrt.serving.protocol.requests import chat_request, completion_request
from specrt.serving.protocol.responses import encoded
from specrt.serving.service import Service
from specrt.serving.tokens import detokenized, tokenized

_CSP = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"

NUM_PREPARING = 4  # requests whose prompts are encoded at a time; each takes time from the engine, and memory


class Json(Response):
    """A JSON body that may contain any text."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


def create_app(
    service: Service | None = None, keys: Sequence[bytes] = (), cors_origins: Sequence[str] = ()
) -> Starlette:
    """The application. ``app.state.service`` may be set later; until then the status is 503.

    Browsers let pages of ``cors_origins`` read the answers; ``*`` stands for all pages.
    """
    routes = [
        Route("/v1/chat/completions", _generate, methods=["POST"], name="chat"),
        Route("/v1/completions", _generate, methods=["POST"], name="completions"),
        Route("/v1/models", _models, methods=["GET"]),
        Route("/v1/models/{name:path}", _model, methods=["GET"]),
        Route("/tokenize", _tokenize, methods=["POST"]),
        Route("/detokenize", _detokenize, methods=["POST"]),
        Route("/health", _health, methods=["GET"]),
        Route("/metrics", _metrics, methods=["GET"]),
        Route("/", _page, methods=["GET"]),
    ]
    app = guarded(routes, keys, cors_origins)
    app.state.service = service
    app.state.preparing = CapacityLimiter(NUM_PREPARING)
    return app


def guarded(routes: Sequence[Route], keys: Sequence[bytes], cors_origins: Sequence[str] = ()) -> Starlette:
    """An application with the errors, the log and the keys of this server."""
    handlers: dict[Any, Any] = {ApiError: _on_error, HTTPException: _on_http_error, Exception: _on_fault}
    # Outside the guard: a browser asks without a key whether it may send one, and a refusal must be readable too
    cors = Middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    middleware = [*([cors] if cors_origins else []), Middleware(Guard, keys=keys)]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


def _service(request: Request) -> Service:
    service: Service | None = request.app.state.service
    if service is None:
        raise unavailable("loading")
    return service


async def _body(request: Request) -> tuple[Service, Any]:
    service = _service(request)
    service.check_ready()
    body = await json_body(request, service.config.limits.max_body_bytes)
    service.check_model(body.get("model") if isinstance(body, dict) else None)
    return service, body


async def _generate(request: Request) -> Any:
    service, body = await _body(request)
    read = chat_request if route_path(request.scope) == "/v1/chat/completions" else completion_request
    wanted = read(body, service.config.defaults)
    if service.prepares_quickly(wanted):
        prepared = service.prepare(wanted)
    else:
        preparing: CapacityLimiter = request.app.state.preparing
        prepared = await anyio.to_thread.run_sync(service.prepare, wanted, limiter=preparing)
    return Exchange(service, wanted, service.job(*prepared))


async def _tokenize(request: Request) -> Response:
    return await _of_tokens(request, tokenized)


async def _detokenize(request: Request) -> Response:
    return await _of_tokens(request, detokenized)


async def _of_tokens(request: Request, action: Callable[[Service, Any], dict[str, Any]]) -> Response:
    service, body = await _body(request)
    return Json(await anyio.to_thread.run_sync(action, service, body, limiter=request.app.state.preparing))


async def _models(request: Request) -> Response:
    service = _service(request)
    return Json({"object": "list", "data": [_model_object(service, name) for name in service.config.model_names]})


async def _model(request: Request) -> Response:
    service, name = _service(request), request.path_params["name"]
    service.check_model(name)
    return Json(_model_object(service, name))


def _model_object(service: Service, name: str) -> dict[str, Any]:
    root = service.runtime.manifest.target.source.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "specrt",
        "root": root,
        "max_model_len": service.max_model_len,
    }


async def _health(request: Request) -> Response:
    _service(request).check_ready()
    return Json({"status": "ok"})


async def _metrics(request: Request) -> Response:
    return Response(_service(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _page(request: Request) -> Response:
    text = resources.files("specrt.serving").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": _CSP})


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _on_error(request: Request, error: ApiError) -> Response:
    return Json(error.as_dict(), error.status, error.headers)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return Json(ApiError(error.status_code, what, None, code).as_dict(), error.status_code, error.headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    return JSONResponse(internal(error).as_dict(), 500)
