"""Many requests without HTTP: those of a batch file, answered as the server answers them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specrt.engines.progress import SILENT, Progress
from specrt.serving.batch_files import Answers, Request
from specrt.serving.exchange import Exchange
from specrt.serving.protocol.errors import ApiError, internal, invalid
from specrt.serving.protocol.requests import chat_request, completion_request
from specrt.serving.service import Job, Service

_LOG = logging.getLogger(__name__)


def run_batch(service: Service, requests: Iterable[Request], answers: Answers, progress: Progress = SILENT) -> None:
    """Answer ``requests``, several at a time, and add each answer as soon as it is whole.

    What is wrong with one is its answer, with the status that the server would give. Raises ``ResourceError`` when the
    file cannot be written.
    """
    asyncio.run(_run(service, list(requests), answers, progress))


def answers_to(service: Service, requests: Sequence[Request]) -> list[tuple[int, Mapping[str, Any]]]:
    """(status, body) of each of ``requests``, all of which are submitted at once."""

    async def all_answers() -> list[tuple[int, Mapping[str, Any]]]:
        return await asyncio.gather(*(_answered(service, request) for request in requests))

    return asyncio.run(all_answers())


async def _run(service: Service, requests: list[Request], answers: Answers, progress: Progress) -> None:
    left = iter(requests)

    async def work() -> None:
        for request in left:
            status, body = await _answered(service, request)
            answers.add(request.custom_id, status, body)
            progress.advance(1)

    # One more than there are places: it reads its prompt meanwhile.
    await asyncio.gather(*(work() for _ in range(service.config.limits.max_concurrency + 1)))


async def _answered(service: Service, request: Request) -> tuple[int, Mapping[str, Any]]:
    job: Job | None = None
    try:
        service.check_model(request.body.get("model"))
        wanted = (chat_request if request.is_chat else completion_request)(request.body, service.config.defaults)
        if wanted.stream:
            raise invalid("stream", "got true, but a batch has whole answers; leave it out")
        choices, num_prompt_tokens = await asyncio.to_thread(service.prepare, wanted)
        job = service.job(choices, num_prompt_tokens)
        return await Exchange(service, wanted, job).whole()
    except ApiError as error:
        return error.status, error.as_dict()
    except Exception as error:  # of one request; the others go on
        _LOG.error("request %r failed", request.custom_id, exc_info=error)
        return 500, internal(error).as_dict()
    finally:
        if job is not None:
            service.scheduler.cancel(job.generations)
