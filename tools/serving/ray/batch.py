"""A batch on a Ray cluster: Ray Data gives the requests to actors that hold the bundle."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import ray.data
from ray.exceptions import RayError

from specrt.engines.errors import BackendError, kind_and_line
from specrt.engines.progress import SILENT, Progress
from specrt.serving.batch import answers_to
from specrt.serving.batch_files import Answers, Request
from specrt.serving.source import Source

CONNECT_S = 10.0
_NO_ADDRESS = ("auto", "local")
_AUTH_MODE = "RAY_AUTH_MODE"  # without it Ray sends no token to an address that is given
BLOCKS_AT_A_TIME = 2  # of an actor: the second fills the places that the first's last requests leave


class Answering:
    """An actor's class: answers blocks of requests."""

    def __init__(self, source: Source) -> None:
        self._service = source.open()

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """``request`` [N] (JSON) to ``custom_id``, ``status`` and ``body`` (JSON) [N]."""
        requests = [Request(**json.loads(text)) for text in block["request"]]
        answers = answers_to(self._service, requests)
        return {
            "custom_id": np.array([request.custom_id for request in requests], dtype=object),
            "status": np.array([status for status, _ in answers]),
            "body": np.array([json.dumps(body) for _, body in answers], dtype=object),
        }


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Within it, this process belongs to the cluster at ``address`` (``local``: one of its own).

    Raises ``BackendError``.
    """
    problem, hint = "no cluster at", "start one with 'ray start --head', or use 'local'"
    try:
        _check(address)
        if address not in _NO_ADDRESS:
            problem = "cannot join the cluster at"
            hint = f"if its nodes have a token, set {_AUTH_MODE}=token, or use 'auto' on one of them"
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        signal.signal(signal.SIGTERM, handler)  # Ray's ends with another exit code
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise BackendError(f"--ray: {problem} {address!r} ({kind_and_line(error)}); {hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` unless something listens there. Ray would try for many minutes."""
    if address in _NO_ADDRESS:
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("expected HOST:PORT, auto or local")
    socket.create_connection((host, int(port)), timeout=CONNECT_S).close()


def run_batch_on_ray(
    source: Source,
    requests: Sequence[Request],
    answers: Answers,
    address: str,
    num_actors: int | None = None,
    progress: Progress = SILENT,
) -> None:
    """Answer ``requests`` on the cluster at ``address``, and add each block's answers as soon as it is complete.

    ``num_actors`` None: as many as the cluster has CPUs for; an actor takes one for each thread. Actors that die are
    replaced, and their blocks are computed again. Raises ``BackendError`` if the cluster gives up.
    """
    place = {**source.place, "threads": source.place.get("threads") or 1}
    source = replace(source, bundle=source.bundle.resolve(), place=place)
    with connected(address):
        try:
            for answer in _answered(source, requests, num_actors).iter_rows():
                answers.add(answer["custom_id"], int(answer["status"]), json.loads(answer["body"]))
                progress.advance(1)
        except RayError as error:
            raise BackendError(f"--ray: {kind_and_line(error)}") from error


def _answered(source: Source, requests: Sequence[Request], num_actors: int | None) -> Any:
    """The data set of the answers, which is computed while it is read."""
    num_cpus, device = source.place["threads"], source.place.get("device")
    rows = [{"request": json.dumps({"custom_id": r.custom_id, "url": r.url, "body": r.body})} for r in requests]
    num_blocks = -(-len(rows) // source.config.limits.max_concurrency)
    if num_actors is None:
        num_actors = max(int(ray.cluster_resources().get("CPU", 1) // num_cpus), 1)
    pool = ray.data.ActorPoolStrategy(
        size=min(num_actors, num_blocks),
        max_tasks_in_flight_per_actor=BLOCKS_AT_A_TIME,
        max_concurrent_calls_per_actor=BLOCKS_AT_A_TIME,
        enable_true_multi_threading=True,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.from_items(rows, override_num_blocks=num_blocks).map_batches(
        Answering,
        batch_size=None,  # a block
        compute=pool,
        fn_constructor_args=(source,),
        num_cpus=num_cpus,
        num_gpus=1 if device == "cuda" else 0,
    )
