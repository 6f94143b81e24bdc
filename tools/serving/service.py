"""The shared state of the endpoints: the open bundle, its scheduler and metrics, and the limits."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specrt.engines.errors import BackendError, UsageError
from specrt.engines.progress import Progress
from specrt.runtime.options import Options
from specrt.runtime.runtime import Runtime, load
from specrt.runtime.stream import Step, Stream
from specrt.runtime.text.codec import Prompt, TextTooLongError
from specrt.serving.metrics import DEFAULT_PREFIX, Metrics
from specrt.serving.protocol.choices import Calling, Choice
from specrt.serving.protocol.errors import ApiError, invalid, too_busy, unavailable
from specrt.serving.protocol.requests import Defaults, Wanted
from specrt.serving.protocol.tool_parsers import FORMATS, format_of_template
from specrt.serving.rounding import needs_reproducible
from specrt.serving.scheduler import Draining, Generation, Outcome, QueueFull, Scheduler
from specrt.serving.structures import grammar_options, refused_request

_LOG = logging.getLogger(__name__)
# The engine waits this long at most for the chunk of a first token. Its next pass takes all cores, and without the wait
# the event loop and a client on this machine would get one after a time slice of the operating system: some ms.
_FIRST_CHUNK_S = 0.005
_WAYS: tuple[Options, ...] = (
    {"max_new_tokens": 1},
    {"max_new_tokens": 1, "temperature": 1.0},
    {"max_new_tokens": 1, "temperature": 1.0, "top_p": 0.9},
    {"max_new_tokens": 1, "temperature": 1.0, "presence_penalty": 0.5},
    {"max_new_tokens": 1, "json_object": True},  # the last, since grammars may not be available
)
_QUICK_CHARS = 2048  # prompts of so many characters are encoded in less time than a change of threads takes


@dataclass(frozen=True)
class Limits:
    """Limits of requests, in numbers, seconds and bytes."""

    max_concurrency: int = 4
    queue_size: int = 64
    request_timeout_s: float = 600.0
    max_body_bytes: int = 4 << 20


@dataclass(frozen=True)
class Config:
    """How to serve a bundle. ``model_names``: the first is the served name, the others are aliases of it."""

    model_names: Sequence[str]
    limits: Limits = field(default_factory=Limits)
    defaults: Defaults = field(default_factory=Defaults)
    metrics_prefix: str = DEFAULT_PREFIX
    tool_parser: str = "auto"


def open_service(
    bundle: Path, config: Config, reproducible: bool | None, place: Mapping[str, Any], progress: Progress
) -> Service:
    """Load ``bundle`` at ``place`` (arguments of ``specrt.load``) and warm it up. None: reproducible where it must be.

    The caller has checked the bundle's files.
    """
    progress.step("load")
    runtime = load(bundle, **place)
    progress.step("warm up")
    is_reproducible = needs_reproducible(runtime) if reproducible is None else reproducible
    defaults = replace(config.defaults, reproducible=is_reproducible or None)
    service = Service(runtime, replace(config, defaults=defaults))
    service.warm_up()
    return service


# (index of the choice, the report of its generation)
Report = tuple[int, Outcome]


class Job:
    """The generations of one request and their reports, for the event loop that created it.

    ``first_sent`` is set when the first token has been sent, or need not be sent soon.
    """

    def __init__(self, choices: Sequence[Choice], num_prompt_tokens: int, timeout_s: float) -> None:
        self.choices, self.num_prompt_tokens = choices, num_prompt_tokens
        self.arrived = time.monotonic()
        self.deadline = self.arrived + timeout_s
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.first_sent = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.generations: list[Generation] = []

    def reporter(self, index: int) -> Callable[[Outcome], None]:
        """A callback for the engine's thread."""

        def report(outcome: Outcome) -> None:
            try:
                self._loop.call_soon_threadsafe(self.reports.put_nowait, (index, outcome))
            except RuntimeError:  # the loop is closed: no request waits any more
                return

        return report


class Service:
    """A served bundle. Closing it closes the runtime."""

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self.runtime, self.config = runtime, config
        manifest = runtime.manifest
        self.max_model_len = manifest.target.spec.max_seq_len
        self.fingerprint = f"specrt-{manifest.specrt_version}-{manifest.target.fingerprint[:8]}"
        self.created = int(time.time())
        self.is_draining = False
        limits = config.limits
        runtime.reserve(limits.max_concurrency)
        self.scheduler = Scheduler(limits.max_concurrency, limits.queue_size)
        self.metrics = Metrics(config.metrics_prefix, self.model_name)
        watch = self.metrics.watch
        watch("num_requests_running", "Running sequences.", lambda: self.scheduler.num_running)
        watch("num_requests_waiting", "Sequences that wait in the queue.", lambda: self.scheduler.num_waiting)
        watch("num_idle_slots", "KV slots that are not used by a sequence.", lambda: runtime.num_idle_slots)

    @property
    def model_name(self) -> str:
        """The model name in responses."""
        return self.config.model_names[0]

    def warm_up(self) -> None:
        """Load what first texts would in each slot: samplers, the start of the template, a tokenizer for grammars."""
        for temperature in (0.0, 1.0):
            self.runtime.generate([0], max_new_tokens=4, temperature=temperature, ignore_eos=True)
        ids, num_slots = [0], self.config.limits.max_concurrency
        with suppress(UsageError):  # there is no template
            ids = self.runtime.codec.encode([{"role": "user", "content": "Hello."}])[: self.max_model_len - 1]
        try:
            for options in _WAYS:
                streams = [self.runtime.stream(ids, **options) for _ in range(num_slots)]
                for stream in streams:
                    next(stream.steps)  # each has a slot
                for stream in streams:
                    stream.close()
        except (UsageError, BackendError) as error:  # the requests that need a grammar get this as a 400
            _LOG.info("no structured output: %s", error)

    def check_model(self, name: Any) -> None:
        """Raise ``ApiError`` unless ``name`` is a name of the model, or None."""
        if name is None or name == "" or name in self.config.model_names:
            return
        if not isinstance(name, str):
            raise invalid("model", f"got {type(name).__name__}, expected {self.model_name!r}")
        raise ApiError(404, f"The model `{name}` does not exist. Served: {self.model_name}", "model", "model_not_found")

    def check_ready(self) -> None:
        """Raise ``ApiError`` while draining, and if the engine's thread has failed."""
        if self.is_draining:
            raise unavailable("draining")
        if not self.scheduler.is_alive:
            raise unavailable("stopped")

    def prepare(self, wanted: Wanted) -> tuple[list[Choice], int]:
        """(choices of a request, number of its prompt tokens). It encodes the prompts, which takes a while.

        Raises ``ApiError``.
        """
        try:
            return self._choices(wanted)
        except (UsageError, BackendError) as error:
            raise refused_request(error, wanted, self.runtime) from error

    def prepares_quickly(self, wanted: Wanted) -> bool:
        """Whether ``prepare`` may be called in the event loop: few short prompts without grammars and variables."""
        is_plain = not (wanted.structure or wanted.tools or (wanted.chat and wanted.chat.chat_template_kwargs))
        num_chars = sum(map(_num_chars_before_template, wanted.prompts))
        return is_plain and wanted.n * len(wanted.prompts) <= 2 and num_chars <= _QUICK_CHARS

    def job(self, choices: Sequence[Choice], num_prompt_tokens: int) -> Job:
        """A request of ``choices``, which is not queued yet. Call it in the event loop."""
        job = Job(choices, num_prompt_tokens, self.config.limits.request_timeout_s)
        job.generations = [
            Generation(choice.stream, self._counted(choice.stream, job, index), job.deadline)
            for index, choice in enumerate(choices)
        ]
        return job

    def submit(self, job: Job) -> None:
        """Queue a request. Raises ``ApiError``."""
        try:
            self.scheduler.submit(job.generations)
        except QueueFull as error:
            self.metrics.count("request_rejected")
            raise too_busy() from error
        except Draining as error:
            raise unavailable("draining") from error

    def close(self) -> None:
        """End all generations and free the bundle's buffers."""
        self.scheduler.close()
        self.runtime.close()

    def _choices(self, wanted: Wanted) -> tuple[list[Choice], int]:
        codec = self.runtime.codec
        form = self._form(wanted)
        calling = Calling(FORMATS[form], wanted.tools) if form and wanted.tools else None
        visible = calling.form.special if calling else ()
        max_tokens = self.max_model_len if wanted.max_tokens is None else wanted.max_tokens
        options = {**wanted.options, "max_new_tokens": max_tokens, "visible_special_tokens": visible}
        options.update(grammar_options(wanted, form, codec.special_tokens))
        choices: list[Choice] = []
        total = 0
        for prompt in wanted.prompts:
            ids = self._ids(prompt, wanted)
            total += len(ids)
            prefix = "" if not wanted.echo else prompt if isinstance(prompt, str) else codec.decode(ids)
            for number in range(wanted.n):
                stream = self.runtime.stream(ids, **self._seeded(options, number))
                index = len(choices)
                choices.append(Choice(index, stream, codec, len(ids), calling, wanted.rounds, visible, prefix))
        return choices, total

    def _form(self, wanted: Wanted) -> str | None:
        """The name of the format of tool calls; None if there can be none."""
        if wanted.tools is None or wanted.chat is None:
            return None
        template = self.runtime.codec.template(wanted.chat)
        if "tools" not in template:
            raise invalid("tools", "the model's chat template does not take tools; leave them out")
        name = self.config.tool_parser
        return format_of_template(template) if name == "auto" else name

    def _ids(self, prompt: Prompt, wanted: Wanted) -> list[int]:
        """Refuses a text that cannot fit before it is encoded, which takes memory of 100 times its size."""
        codec = self.runtime.codec
        try:
            ids = codec.encode(prompt, wanted.chat, max_encoded_chars=self.max_model_len * codec.max_token_chars)
        except TextTooLongError as error:
            raise self._too_long(f"{error.num_chars} characters", wanted.is_chat) from error
        if len(ids) >= self.max_model_len:
            raise self._too_long(f"{len(ids)} tokens", wanted.is_chat)
        return ids

    def _too_long(self, got: str, is_chat: bool) -> ApiError:
        return invalid(
            "messages" if is_chat else "prompt",
            f"got {got}, the model's maximum context length is {self.max_model_len} tokens and the answer needs one at "
            "least; shorten it",
            "context_length_exceeded",
        )

    @staticmethod
    def _seeded(options: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Options with the seed of choice ``number``. The first choice is the same as in a request with n = 1."""
        seed = options.get("seed")
        if number == 0 or seed is None:
            return dict(options)
        return {**options, "seed": (seed + number) % (1 << 63) if isinstance(seed, int) else seed}

    def _counted(self, stream: Stream, job: Job, index: int) -> Callable[[Outcome], None]:
        """A report that also counts the generation. Runs in the engine's thread."""
        report, metrics = job.reporter(index), self.metrics
        begun = math.nan

        def counted(outcome: Outcome) -> None:
            nonlocal begun
            if isinstance(outcome, Step):
                is_first = math.isnan(begun) and bool(outcome.round.emitted)
                if is_first:
                    begun = time.monotonic()
                    report(outcome)
                    job.first_sent.wait(_FIRST_CHUNK_S)
                    metrics.count_prefill(stream.stats)
                    metrics.observe("time_to_first_token_seconds", begun - job.arrived)
                    waited = (job.generations[index].started or begun) - job.arrived
                    metrics.observe("request_queue_time_seconds", waited)
                metrics.count_step(outcome)
                if is_first:
                    return
            elif outcome is None:
                num_further = len(stream.token_ids) - 1
                if num_further > 0:
                    metrics.observe("request_time_per_output_token_seconds", (time.monotonic() - begun) / num_further)
                metrics.count_finished(stream.result.finish_reason)
            report(outcome)

        return counted


def _num_chars_before_template(prompt: Prompt) -> int:
    """The characters of a text, or of messages as they came; 0 for ids."""
    parts = [] if isinstance(prompt, str) else [part for part in prompt if isinstance(part, dict)]
    return len(prompt) if isinstance(prompt, str) else sum(len(str(value)) for part in parts for value in part.values())
