"""Prometheus metrics with vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from specrt.engines.errors import UsageError
from specrt.runtime.result import Stats
from specrt.runtime.stream import Step

DEFAULT_PREFIX = "vllm:"
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_WAIT_S = (0.0, 0.01, 0.1, *_REQUEST_S)

_COUNTERS = {
    "spec_decode_num_drafts": "Rounds that verified drafted tokens.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "prompt_tokens": "Prompt tokens, including cached ones.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the caches of earlier sequences.",
    "prefix_cache_hits": "Prompt tokens that were found in the caches of earlier sequences.",
    "request_cancelled": "Requests whose client disconnected.",
    "request_rejected": "Requests refused because the queue was full.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From the arrival of a request to a choice's first token.", _FIRST_TOKEN_S),
    "request_time_per_output_token_seconds": ("Time after the first token, per further token.", _TOKEN_S),
    "request_queue_time_seconds": ("Time in the queue.", _WAIT_S),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", _REQUEST_S),
}


def check_prefix(prefix: str) -> None:
    """Raise ``UsageError`` for a prefix that is invalid in Prometheus names."""
    if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", prefix):
        raise UsageError(f"--metrics-prefix: got {prefix!r}, expected letters, digits, '_' and ':'")


class Metrics:
    """The metrics of one server. Each has the label ``model_name``."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._prefix, self._model_name = prefix, model_name
        self._counters = {name: self._made(Counter, name, text) for name, text in _COUNTERS.items()}
        self._histograms = {
            name: self._made(Histogram, name, text, buckets=buckets) for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._accepted = self._labelled(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft.", "position"
        )
        self._success = self._labelled(Counter, "request_success", "Finished choices.", "finished_reason")

    def text(self) -> bytes:
        """The content of ``/metrics``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """The same as objects."""
        return self._registry.collect()

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is computed when it is read."""
        self._made(Gauge, name, help_text).set_function(value)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        self._counters[name].inc(amount)

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        self._histograms[name].observe(seconds)

    def count_step(self, step: Step) -> None:
        """Count a round."""
        self.count("generation_tokens", len(step.round.emitted))
        if step.round.drafted:
            self.count("spec_decode_num_drafts")
            self.count("spec_decode_num_draft_tokens", len(step.round.drafted))
            self.count("spec_decode_num_accepted_tokens", step.round.num_accepted)
            for position in range(step.round.num_accepted):
                self._accepted.labels(self._model_name, str(position)).inc()

    def count_prefill(self, stats: Stats) -> None:
        """Count a prefilled prompt."""
        self.count("prompt_tokens", stats.prompt_tokens)
        self.count("prefix_cache_queries", stats.prompt_tokens)
        self.count("prefix_cache_hits", stats.reused_prompt_tokens)

    def count_finished(self, reason: str) -> None:
        """Count a finished choice."""
        self._success.labels(self._model_name, reason).inc()

    def _labelled(self, kind: type[Counter], name: str, text: str, label: str) -> Counter:
        return kind(self._prefix + name, text, ["model_name", label], registry=self._registry)

    def _made(self, kind: type[MetricWrapperBase], name: str, text: str, **options: Any) -> Any:
        metric = kind(self._prefix + name, text, ["model_name"], registry=self._registry, **options)
        return metric.labels(self._model_name)
