"""The application for Ray Serve: a gateway and N replicas."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray import serve

from specrt.engines.errors import UsageError
from specrt.serving.defaults import AUTO
from specrt.serving.ray.engine import Engine
from specrt.serving.ray.gateway import Gateway
from specrt.serving.ray.routing import PrefixRouter
from specrt.serving.service import Limits
from specrt.serving.source import Source, config_from_bundle

_LIMITS = Limits()


def app(
    bundle: str | Path,
    num_replicas: int | str | None = None,
    *,
    num_gateways: int = 1,
    served_model_name: Sequence[str] = (),
    limits: Limits = _LIMITS,
    generation_config: str = AUTO,
    reproducible: bool | None = None,
    tool_parser: str = "auto",
    api_keys: Sequence[str] = (),
    place: Mapping[str, Any] | None = None,
    drain_timeout_s: float = 30.0,
    autoscaling_config: Mapping[str, Any] | None = None,
    ray_actor_options: Mapping[str, Any] | None = None,
    **deployment_options: Any,
) -> Any:
    """An application for ``ray.serve.run``: ``specrt serve`` with ``num_replicas`` engines behind ``num_gateways``.

    ``bundle`` is a path that exists on every machine. ``place`` are arguments of ``specrt.load``; without ``threads`` a
    replica takes as many as its ``num_cpus`` (default 1). ``autoscaling_config``, ``ray_actor_options`` and
    ``deployment_options`` are Ray Serve's, for the replicas. The other arguments are the options of ``specrt serve``.
    Raises ``UsageError`` and ``BundleError``.
    """
    bundle = Path(bundle).resolve()
    config = config_from_bundle(bundle, served_model_name, limits, generation_config, tool_parser=tool_parser)
    actor = {"num_cpus": 1, **(ray_actor_options or {})}
    place = {"threads": max(int(actor["num_cpus"]), 1), **(place or {})}
    options: dict[str, Any] = {
        "ray_actor_options": actor,
        "max_ongoing_requests": limits.max_concurrency + limits.queue_size,
        "max_queued_requests": max(limits.queue_size, 1),
        "graceful_shutdown_timeout_s": drain_timeout_s,
        "request_router_config": {
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"busy_at": limits.max_concurrency},
        },
        **deployment_options,
    }
    if num_replicas is not None:
        options["num_replicas"] = num_replicas
    if autoscaling_config is not None:
        options["autoscaling_config"] = dict(autoscaling_config)
    engine = serve.deployment(Engine).options(**options).bind(Source(bundle, config, reproducible, place))
    gateway = serve.deployment(Gateway).options(
        num_replicas=num_gateways,
        max_ongoing_requests=1 << 16,
        graceful_shutdown_timeout_s=drain_timeout_s,
        ray_actor_options={"num_cpus": 0},
    )
    return gateway.bind(engine, [key.encode() for key in api_keys], limits.max_body_bytes)


def build(arguments: Mapping[str, str]) -> Any:
    """``app`` for ``serve run specrt.serving.ray:build bundle=PATH num_replicas=2``. Values are JSON or text."""
    values = {name: _value(text) for name, text in arguments.items()}
    if "bundle" not in values:
        raise UsageError("bundle: missing; give bundle=PATH")
    if "limits" in values:
        values["limits"] = Limits(**values["limits"])
    return app(**values)


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return text
