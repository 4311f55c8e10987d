"""Check of shared passes: requests that run together equal the same requests alone, bitwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from specedge.bundle import Bundle
from specedge.errors import SpecEdgeError
from specedge.runtime.backend.memory import fitting_slots
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.requests.loader import memory_of
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.requests.stream import Generation, run_together

from .audited_pair import ROWS, AuditPrompt, DecoderParts
from .budget import Budget
from .report import FAILED, PASSED, SHORT, SKIPPED, CheckResult

NUM_SLOTS = 4
# Texts of several lengths, so that requests end and begin beside others.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 40},
    {"max_new_tokens": 6, "temperature": 1.0, "num_draft_tokens": 2},
    {"max_new_tokens": 16, "num_draft_tokens": 1},
    {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.9},
    {"max_new_tokens": 12, "num_draft_tokens": 0},
    {"max_new_tokens": 30, "temperature": 1.0, "coupling": "gumbel", "num_draft_tokens": 3},
)
LONG = 2  # index of the options of requests with a long prompt


@dataclass(frozen=True)
class ComparedRequest:
    """Prompt and options of a request that runs beside others and alone."""

    name: str
    prompt: list[int]
    options: dict[str, Any]

    def __str__(self) -> str:
        temperature, k = self.options.get("temperature", 0), self.options["num_draft_tokens"]
        return f"{self.name}, temperature {temperature:g}, K = {k}"


class BatchedCheck:
    """Requests to run together and alone; those alone run once for all runs of the check.

    Args:
        bundle: The bundle.
        ops: Graph variant.
        load: Loads the bundle with a number of slots for texts of a maximum length.
        prompts: Prompts of the requests.
    """

    def __init__(
        self,
        bundle: Bundle,
        ops: str,
        load: Callable[[int, int], Pipeline],
        prompts: Sequence[AuditPrompt],
    ) -> None:
        self._bundle, self._ops, self._load = bundle, ops, load
        self._requests = list(_requests(bundle, prompts))
        longest = max(len(r.prompt) + r.options["max_new_tokens"] for r in self._requests)
        self._max_length = min(longest, bundle.context_length)
        self._alone: list[Generation] = []

    def run(self, budget: Budget, parts: DecoderParts | None = None) -> CheckResult:
        """Compare tokens and log-probabilities of as many requests as the time allows.

        Args:
            budget: Time limit of the requests that run together.
            parts: Parts whose `batch` replaces the passes of the load.
        """
        if budget.over:
            return CheckResult("batched", SHORT, "no request")
        need = memory_of(self._bundle, self._ops, NUM_SLOTS, self._max_length)
        num_slots = fitting_slots(need, NUM_SLOTS)
        if num_slots == 1:
            summary = "the available memory does not suffice for several requests"
            return CheckResult("batched", SKIPPED, summary)
        with self._load(num_slots, self._max_length) as pipeline:
            targets = [cast(OrtModel, slot.target) for slot in pipeline.slots.all]
            batch = targets[0].batch
            if batch is None:
                return CheckResult("batched", SKIPPED, pipeline.note or "requests take turns")
            batch = parts.batch(batch) if parts else batch
            for target in targets:
                target.batch = batch
            together = list(self._run_together(pipeline, budget))
        self._run_alone(len(together))
        return self._result(num_slots, together, pipeline.notes)

    def _run_together(self, pipeline: Pipeline, budget: Budget) -> Iterator[Generation]:
        begins = (
            partial(pipeline.stream, request.prompt, **request.options)
            for i, request in enumerate(self._requests)
            if i < len(OPTIONS) or not budget.over
        )
        for result in run_together(pipeline.slots, begins):
            if isinstance(result, SpecEdgeError):
                raise result
            yield result

    def _run_alone(self, count: int) -> None:
        """Run those of the first `count` requests that have not run alone."""
        if not (requests := self._requests[len(self._alone) : count]):
            return
        with self._load(1, self._max_length) as pipeline:
            self._alone += [pipeline.generate(r.prompt, **r.options) for r in requests]

    def _result(
        self, num_slots: int, together: Sequence[Generation], notes: Sequence[str]
    ) -> CheckResult:
        triples = zip(self._requests, together, self._alone, strict=False)
        problems = [
            f"{request}: {difference}"
            for request, actual, expected in triples
            if (difference := _difference(actual, expected))
        ]
        num_requests = len(together)
        num_tokens = sum(len(generation.tokens) for generation in together)
        figures = {
            "num_slots": num_slots,
            "num_requests": num_requests,
            "num_tokens": num_tokens,
            "differences": problems,
        }
        lines = (*problems[:10], *notes)
        if problems:
            summary = f"{len(problems)} of {num_requests} requests depend on those beside them"
            return CheckResult("batched", FAILED, summary, lines, figures)
        summary = (
            f"{num_tokens} tokens and log-probabilities of {num_requests} requests in {num_slots} "
            "slots are bitwise those of the requests alone"
        )
        return CheckResult("batched", PASSED, summary, lines, figures)


def _requests(bundle: Bundle, prompts: Sequence[AuditPrompt]) -> Iterator[ComparedRequest]:
    """Yield the requests.

    No prompt has the first token of another: a prefix in the cache of a slot would shorten a pass.
    """
    most = max(1, bundle.context_length // 2)
    text = itertools.chain.from_iterable(prompt.tokens for prompt in prompts)
    long = AuditPrompt("all prompts concatenated", tuple(itertools.islice(text, 2 * ROWS)))
    for i, options in enumerate(2 * OPTIONS):
        prompt = long if options is OPTIONS[LONG] else prompts[i % len(prompts)]
        tokens = [i % bundle.target.vocab_size, *prompt.tokens][:most]
        defaults = {"num_draft_tokens": bundle.num_draft_tokens, "logprobs": 2, "seed": i}
        yield ComparedRequest(prompt.name, tokens, defaults | options)


def _difference(actual: Generation, expected: Generation) -> str | None:
    """Return the first difference of two texts, or None."""
    for i, (token, other) in enumerate(itertools.zip_longest(actual.tokens, expected.tokens)):
        if token != other:
            return f"new token {i}: {token} instead of {other}"
    return None if actual.logprobs == expected.logprobs else "log-probabilities differ"
