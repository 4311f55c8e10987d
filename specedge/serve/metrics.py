"""Server metrics in Prometheus' text format."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specedge.runtime.requests.stats import Stats

from .job_queue import JobQueue

STATUS = "specedge.status"  # scope key: final status of a stream, which may fail after its 200
DISCONNECTED = "gone"  # status of a request whose client disconnected before the end
_MAX_IGNORED = 200  # maximum number of field names as metric labels
_LOG = logging.getLogger("specedge")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class ServerMetrics:
    """Counters, histograms and gauges of a server."""

    def __init__(self, jobs: JobQueue) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"specedge_{name}", help, labels, registry=registry)

        self.requests = counter("requests", "Requests by path and final status.", "path", "status")
        self.tokens = counter(
            "tokens",
            "Prompt tokens, reused prompt tokens and new tokens, also of cancelled requests.",
            "kind",
        )
        self.drafted = counter(
            "draft_tokens",
            "Drafted, tested and accepted draft tokens; accepted/tested is the acceptance rate.",
            "kind",
        )
        self._ignored = counter(
            "ignored_fields", "Unknown request fields, which were ignored.", "field"
        )
        self._ignored_names: set[str] = set()
        self.first_text = Histogram(
            "specedge_time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first text.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "specedge_time_per_token_seconds",
            "Seconds per token from the first piece of a text to its end.",
            buckets=_SECONDS_PER_TOKEN,
            registry=registry,
        )
        for name, help, value in (
            ("slots", "Maximum number of concurrent requests.", lambda: jobs.num_slots),
            ("running", "Number of running requests.", lambda: jobs.num_running),
            ("queue", "Number of requests that wait for a slot.", lambda: jobs.num_waiting),
        ):
            Gauge(f"specedge_{name}", help, registry=registry).set_function(value)

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

    def add_stats(self, stats: Stats) -> None:
        """Count the tokens of a finished or cancelled text."""
        counts = {
            "prompt": stats.num_prompt_tokens,
            "reused": stats.num_reused_tokens,
            "new": stats.num_new_tokens,
        }
        for label, count in counts.items():
            self.tokens.labels(label).inc(count)
        drafted = {
            "drafted": stats.num_drafted,
            "tested": stats.num_tested,
            "accepted": stats.num_accepted,
        }
        for label, count in drafted.items():
            self.drafted.labels(label).inc(count)

    def add_completed(self, stats: Stats, first_time: float | None) -> None:
        """Record the time per token of a complete text whose first piece came at `first_time`."""
        if first_time is not None and stats.num_new_tokens > 1:
            seconds = time.perf_counter() - first_time
            self.per_token.observe(seconds / stats.num_new_tokens)
