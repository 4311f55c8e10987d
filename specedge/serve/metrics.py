"""What /metrics says, in Prometheus' format."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specedge.runtime.requests.stats import Stats

from .jobs import Jobs

STATUS = "specedge.status"  # in a request's scope: what became of a stream that began with 200
GONE = "gone"  # the client was, before its answer's end
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """Counts of one server."""

    def __init__(self, jobs: Jobs) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"specedge_{name}", help, labels, registry=registry)

        self.requests = counter(
            "requests", "Requests by path and status: of a stream its end's.", "path", "status"
        )
        self.tokens = counter(
            "tokens",
            "Tokens: of prompts, of those reused, new; of texts that were cut, too.",
            "kind",
        )
        self.drafted = counter(
            "draft_tokens",
            "Draft tokens: drafted, tested, accepted. Acceptance is their ratio.",
            "kind",
        )
        self.first = Histogram(
            "specedge_time_to_first_token_seconds",
            "From a request's arrival to its first text.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "specedge_time_per_token_seconds",
            "From a text's first piece to its end, by its tokens.",
            buckets=_PER_TOKEN,
            registry=registry,
        )
        for name, help, value in (
            ("slots", "Requests that can run at a time.", lambda: jobs.num_slots),
            ("running", "Requests that run.", lambda: jobs.num_running),
            ("queue", "Requests that wait for a slot.", lambda: jobs.num_waiting),
        ):
            Gauge(f"specedge_{name}", help, registry=registry).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def ended(self, stats: Stats) -> None:
        """A text goes no further, whole or not."""
        counts = {
            "prompt": stats.num_prompt_tokens,
            "reused": stats.num_reused_tokens,
            "new": stats.num_new_tokens,
        }
        for kind, count in counts.items():
            self.tokens.labels(kind).inc(count)
        drafted = {
            "drafted": stats.num_drafted,
            "tested": stats.num_tested,
            "accepted": stats.num_accepted,
        }
        for kind, count in drafted.items():
            self.drafted.labels(kind).inc(count)

    def whole(self, stats: Stats, first: float | None) -> None:
        """A text has come to its end whose first piece came at a time."""
        if first is not None and stats.num_new_tokens > 1:
            self.per_token.observe((time.perf_counter() - first) / stats.num_new_tokens)
