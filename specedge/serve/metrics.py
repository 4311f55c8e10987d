"""Server metrics in Prometheus' text format, with vLLM's names and meanings."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from specedge.runtime.requests.engine import Engine
from specedge.runtime.requests.stream import Generation, TextPiece

from .choices import FINISH_REASONS, ResponseChoice
from .job_queue import JobQueue

STATUS = "specedge.status"  # scope key: final status of a stream, which may fail after its 200
DISCONNECTED = "gone"  # status of a request whose client disconnected before the end
_MAX_IGNORED = 200  # maximum number of field names as metric labels
_LOG = logging.getLogger("specedge")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_PASS_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServerMetrics:
    """Counters, histograms and gauges of a server."""

    def __init__(self, jobs: JobQueue, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"specedge_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            return Histogram(f"specedge_{name}", help, buckets=buckets, registry=registry)

        self.http_requests = counter(
            "http_requests", "HTTP requests by path and final status.", "handler", "status"
        )
        self._ignored = counter(
            "ignored_fields", "Unknown request fields, which were ignored.", "field"
        )
        self._ignored_names: set[str] = set()
        self._request_success = counter(
            "request_success",
            "Texts by the reason of their end: stop, length, abort or error.",
            "finished_reason",
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of ended texts.")
        self._generation_tokens = counter("generation_tokens", "New tokens of ended texts.")
        self._prefix_cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_cache_hits = counter(
            "prefix_cache_hits", "Prompt tokens reused from the prefix cache."
        )
        self._drafts = counter("spec_decode_num_drafts", "Rounds with draft tokens.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in the draft, from 0 on.",
            "position",
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "Seconds for which a text waited for a slot."
        )
        self._time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first text.",
        )
        self._inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Seconds between two pieces of a text, each of one round.",
            _SECONDS_PER_TOKEN,
        )
        self._time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token of a complete text after its first piece.",
            _SECONDS_PER_TOKEN,
        )
        for name, help, value in (
            ("slots", "Maximum number of running requests.", lambda: jobs.num_slots),
            ("num_requests_running", "Running requests.", lambda: jobs.num_running),
            ("num_requests_waiting", "Requests that wait for a slot.", lambda: jobs.num_waiting),
        ):
            Gauge(f"specedge_{name}", help, registry=registry).set_function(value)
        registry.register(_PassCollector(engine))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def add_ignored(self, names: Collection[str]) -> None:
        """Count unknown fields; log each name once."""
        for name in names:
            if name not in self._ignored_names and len(self._ignored_names) < _MAX_IGNORED:
                self._ignored_names.add(name)
                _LOG.warning("ignored unknown request field %s; --strict rejects it", name)
            self._ignored.labels(name if name in self._ignored_names else "other").inc()

    def add_piece(self, piece: TextPiece, choice: ResponseChoice, arrival: float) -> None:
        """Record the time since the piece before, or since the arrival of the request."""
        if choice.last_time is None:
            choice.first_time = piece.time
            self._time_to_first_token.observe(piece.time - arrival)
        else:
            self._inter_token_latency.observe(piece.time - choice.last_time)
        choice.last_time = piece.time

    def add_completed(self, generation: Generation, choice: ResponseChoice) -> None:
        """Record the time per token of a complete text."""
        num_tokens = generation.stats.num_new_tokens
        if choice.first_time is not None and choice.last_time is not None and num_tokens > 1:
            seconds = choice.last_time - choice.first_time
            self._time_per_output_token.observe(seconds / (num_tokens - 1))

    def add_ended(self, generation: Generation, has_failed: bool) -> None:
        """Count the tokens of a text that is complete, was cancelled or has failed."""
        stats = generation.stats
        reason = FINISH_REASONS.get(generation.finish_reason, "abort")
        self._request_success.labels("error" if has_failed else reason).inc()
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        self._generation_tokens.inc(stats.num_new_tokens)
        self._prefix_cache_queries.inc(stats.num_prompt_tokens)
        self._prefix_cache_hits.inc(stats.num_reused_tokens)
        self._drafts.inc(sum(stats.tested_by_position[:1]))
        self._draft_tokens.inc(stats.num_drafted)
        self._accepted_tokens.inc(stats.num_accepted)
        for position, count in enumerate(stats.accepted_by_position):
            self._accepted_by_position.labels(str(position)).inc(count)


class _PassCollector(Collector):
    """Histogram of the tokens per pass, from the counts of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[HistogramMetricFamily]:
        counts = self._engine.num_passes_by_length.copy()
        buckets = [
            (f"{limit}.0", sum(n for length, n in counts.items() if length <= limit))
            for limit in _PASS_LENGTHS
        ]
        yield HistogramMetricFamily(
            "specedge_iteration_tokens_total",
            "Tokens per pass of the target, of all requests that share it.",
            buckets=[*buckets, ("+Inf", counts.total())],
            sum_value=sum(length * n for length, n in counts.items()),
        )
