"""Metrics of the server in Prometheus' text format."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specedge.runtime.requests.stats import Stats

from .job_queue import JobQueue

STATUS = "specedge.status"  # key of a request's scope: final status of a stream, after its 200
DISCONNECTED = "gone"  # status of a request whose client left before the end
_MAX_IGNORED = 200  # names of ignored fields that are told apart
_LOG = logging.getLogger("specedge")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class ServerMetrics:
    """Counters, histograms and gauges of one server."""

    def __init__(self, jobs: JobQueue) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"specedge_{name}", help, labels, registry=registry)

        self.requests = counter(
            "requests", "Requests by path and status; of streams by final status.", "path", "status"
        )
        self.tokens = counter(
            "tokens",
            "Tokens of prompts, reused from a cache, and new, including those of cut texts.",
            "kind",
        )
        self.drafted = counter(
            "draft_tokens",
            "Draft tokens drafted, tested and accepted; accepted/tested is the acceptance rate.",
            "kind",
        )
        self._ignored = counter(
            "ignored_fields", "Unknown fields of requests, which had no effect.", "field"
        )
        self._ignored_names: set[str] = set()
        self.first_text = Histogram(
            "specedge_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first text.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "specedge_time_per_token_seconds",
            "Seconds per token from a text's first piece to its end.",
            buckets=_SECONDS_PER_TOKEN,
            registry=registry,
        )
        for name, help, value in (
            ("slots", "Slots: requests that can run at a time.", lambda: jobs.num_slots),
            ("running", "Requests running.", lambda: jobs.num_running),
            ("queue", "Requests waiting for a slot.", lambda: jobs.num_waiting),
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
                _LOG.warning("request field %s has no effect; --strict rejects it", name)
            self._ignored.labels(name if name in self._ignored_names else "other").inc()

    def add_stats(self, stats: Stats) -> None:
        """Count the tokens of a text that has ended, complete or cut."""
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
