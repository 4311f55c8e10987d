"""Stream of a request's text, its rounds and its result."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specedge.errors import SpecEdgeError
from specedge.request import AUTO, GenerationRequest, PlannedRounds
from specedge.sampling_options import Sampling

from ..decoding.decoding import SpeculativeDecoder
from ..decoding.invariance import UNBOUNDED
from ..decoding.near_ties import NearTieResolver
from ..decoding.protocols import (
    NearTie,
    Operation,
    Plan,
    Round,
)
from ..decoding.timing import TimedModel
from ..planning.plans import AutoPlan, RoundTimes, create_round_times, summarize_rounds
from ..sampling.logprobs import TokenLogprobs
from ..sampling.source import Source
from ..text.detokenizer import FinishReason, TextAssembler, TextSpan, token_outcomes
from .engine import Job
from .slots import Lease, NoFreeSlotError, Slots
from .stats import Stats, compute_stats


@dataclass(frozen=True)
class Generation:
    """Result of a request.

    Attributes:
        text: Continuation alone, without the end token or stop string that ended it.
        tokens: New token ids, including the end token or the tokens of the stop string.
        finish_reason: "length" (`max_new_tokens`), "end" (end token), "stop" (stop string),
            "context" (context is full) or "unfinished".
        seed: Seed that repeats the request.
        num_draft_tokens: K, or "auto".
        drafter: Name of the drafter.
        plan: Drafter and K of each round, equal ones in a row counted together, as the option
            `replay` takes it.
        expected_speedup: Speed-up of planned rounds over plain decoding by the cost table.
        stats: Statistics.
        rounds: Rounds.
        spans: `text` by token, with each token's outcome: accepted, recovered, bonus or plain.
        logprobs: Log-probabilities of `tokens`, if they were requested.
        lossy: Option that made the text follow another distribution than the target's, or None.
        near_ties: Greedy choices that the noise of this device may have changed.
        noise: Largest assumed difference of a logit from plain decoding's; 0 if bitwise equal.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    num_draft_tokens: int | str
    drafter: str
    plan: list[PlannedRounds]
    expected_speedup: float | None
    stats: Stats
    rounds: list[Round] = field(repr=False)
    spans: list[TextSpan] = field(repr=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
    lossy: str | None = None
    near_ties: list[NearTie] = field(default_factory=list)
    noise: float = 0.0


@dataclass(frozen=True)
class TextPiece:
    """Piece of a text, with the tokens since the piece before.

    Attributes:
        spans: Text by token, with each token's outcome.
        logprobs: Log-probabilities of the tokens but an end token, if they were requested.
        tokens: Token ids.
        time: `time.perf_counter()` when its round ended.
    """

    spans: list[TextSpan]
    logprobs: list[TokenLogprobs]
    tokens: list[int] = field(default_factory=list)
    time: float = field(default_factory=time.perf_counter, compare=False)

    @property
    def text(self) -> str:
        """Text of the piece."""
        return "".join(span.text for span in self.spans)


@dataclass
class ActiveRequest:
    """Request that runs in a slot, and its rounds so far.

    In an encoder-decoder, `prompt` has the first tokens of the text, and the request's prompt is
    the `source`. `target` is that of the `decoder`, and `exact_target` the target as the near-tie
    resolver uses it. `drafter` is the name of the drafter, AUTO if rounds are planned.
    """

    request: GenerationRequest
    prompt: list[int]
    source: Source | None
    sampling: Sampling
    seed: int
    limit: int
    decoder: SpeculativeDecoder
    target: TimedModel
    exact_target: TimedModel
    draft: TimedModel | None
    lease: Lease
    drafter: str
    done: list[Round] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    num_new_tokens: int = field(default=0, init=False)
    logit_noise: float = field(default=0.0, init=False)
    round_times: RoundTimes | None = field(init=False)

    def __post_init__(self) -> None:
        has_logprobs = self.request.logprobs is not None
        self.round_times = create_round_times(self.decoder.plan, self.sampling, has_logprobs)

    def steps(self) -> Generator[Operation | Round, Any]:
        """Yield operations and rounds, as `SpeculativeDecoder.decode`.

        An exact request prefills its whole prompt: cached rows may be of longer passes.
        """
        if self.request.exact:
            self.target.truncate(0)
        self.decoder.resolver = self._near_tie_resolver()
        if self.decoder.resolver or self.request.exact:
            self.decoder.max_first_length = 1
        yield from self.decoder.decode(
            self.prompt, self.sampling, self.seed, self.limit, self.request.logprobs, self.source
        )

    def _near_tie_resolver(self) -> NearTieResolver | None:
        """Return a resolver for greedy text if passes are not pass-length-invariant."""
        if not self.sampling.greedy:
            return None
        exact, k = self.request.exact, self.decoder.plan.max_draft_tokens
        with self.decoder.stopwatch.part("noise"):
            text = self.source.tokens if self.source else []
            noise = self.lease.slot.noise.bound([*self.prompt, *text], k, trusts_export=not exact)
            self.logit_noise = noise
        if exact and noise == UNBOUNDED:
            raise SpecEdgeError(
                "passes of this mixture of experts are not pass-length-invariant on this "
                "device, which may change the choice of experts; use 0 draft tokens to be exact"
            )
        return NearTieResolver(self.exact_target, noise, exact) if noise else None

    @property
    def stats(self) -> Stats:
        """Statistics so far."""
        seconds, first = self.decoder.stopwatch.seconds.copy(), self.target.seconds_of_first
        seconds["prefill"] -= first
        seconds["verify"] += first
        return compute_stats(
            self.done,
            self.request.fixed_k or 0,
            seconds,
            num_prompt_tokens=len(self.prompt) if self.source is None else self.source.length,
            num_new_tokens=self.num_new_tokens,
            num_reused_tokens=self.decoder.num_reused_tokens,
            num_draft_passes=self.draft.num_passes if self.draft else 0,
            num_target_passes=self.target.num_passes,
            num_exact_passes=self.exact_target.num_passes,
        )


class Stream:
    """Iterator over the pieces of a request's text. It may be closed or abandoned at any time.

    It owns a slot until its text ends, or until it is closed, cancelled or garbage-collected,
    whichever threads read it. `on_end` is called with the request and the new tokens when the text
    has ended.

    Attributes:
        job: The request in the engine.
    """

    def __init__(
        self,
        active: ActiveRequest,
        text: TextAssembler,
        slots: Slots,
        on_end: Callable[[ActiveRequest, list[int]], None],
    ) -> None:
        self._active, self._text, self._slots, self._on_end = active, text, slots, on_end
        self.job = Job(active.steps(), active.decoder.stopwatch, active.lease.release)
        self._reading = threading.Lock()  # held by a reader
        self._seconds = 0.0  # of the request, up to the last round, if round times are recorded

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while (piece := self.read()) is not None:
            if piece:
                return piece
        raise StopIteration

    def read(self) -> str | None:
        """Return the text of the next round, which may be empty; None at the end."""
        job = self.job
        if job.is_cancelled:
            return None
        try:
            with self._reading:
                if job.is_cancelled:  # while this thread waited for a reader
                    return None
                round_ = self._slots.engine.next(job)
                return None if round_ is None else self._add(round_)
        except BaseException:
            self.cancel()
            raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def traced(self) -> Iterator[list[TextSpan]]:
        """Yield the pieces as spans: the text of each token, with the token's outcome."""
        for _ in self:
            yield self._text.spans[-1]

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the pieces; the last one has no text if only log-probabilities are left."""
        num_tokens = num_logprobs = 0
        while True:
            spans = self._text.spans[-1] if next(self, None) is not None else []
            tokens, logprobs = self._text.tokens[num_tokens:], self.logprobs(num_logprobs)
            if logprobs and self.finish_reason == FinishReason.END:
                logprobs.pop()
            if spans or logprobs:
                yield TextPiece(spans, logprobs, tokens)
            if not spans:
                return
            num_tokens += len(tokens)
            num_logprobs += len(logprobs)

    def close(self) -> None:
        """Stop; `generation` has the result so far."""
        self.cancel()

    def cancel(self) -> None:
        """Stop now or, while a thread runs the request, before its next pass."""
        self.job.cancel()

    @property
    def plan(self) -> Plan:
        """Plan of the rounds."""
        return self._active.decoder.plan

    @property
    def finish_reason(self) -> FinishReason:
        """Reason that the text ended, "unfinished" until then."""
        return self._text.finish_reason

    @property
    def stats(self) -> Stats:
        """Statistics so far."""
        return self._active.stats

    @property
    def generation(self) -> Generation:
        """Result so far."""
        active, text, rounds = self._active, self._text, self._active.done
        plan, k = active.decoder.plan, active.request.fixed_k
        spans = [span for piece in text.spans for span in piece]
        return Generation(
            text="".join(span.text for span in spans),
            tokens=list(text.tokens),
            finish_reason=text.finish_reason,
            seed=active.seed,
            num_draft_tokens=AUTO if k is None else k,
            drafter=active.drafter,
            plan=summarize_rounds(rounds),
            expected_speedup=plan.planner.expected_speedup if isinstance(plan, AutoPlan) else None,
            stats=active.stats,
            rounds=list(rounds),
            spans=spans,
            logprobs=None if active.request.logprobs is None else self.logprobs(),
            lossy=None if k == 0 else active.sampling.lossy,
            near_ties=[t for r in rounds for t in r.near_ties if t.position < len(text.tokens)],
            noise=active.logit_noise,
        )

    def logprobs(self, start: int = 0) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens from `start` on, if they were requested."""
        return self._active.logprobs[start : len(self._text.tokens)]

    def _record_time(self, round_times: RoundTimes, round_: Round) -> None:
        """Record the time of a planned round, without near-ties to resolve, that ran alone.

        The first round is left out, since its pass may include the prompt.
        """
        active, plan = self._active, self._active.decoder.plan
        if not isinstance(plan, AutoPlan) or plan.choice is None:
            return
        if active.done and not active.logit_noise and not self._slots.has_others(active.lease):
            length = len(active.prompt) + active.num_new_tokens
            seconds = active.decoder.stopwatch.total - self._seconds
            round_times.record(plan.choice, round_, length, seconds)

    def _add(self, round_: Round) -> str:
        """Add a round; return its text."""
        active, stopwatch = self._active, self._active.decoder.stopwatch
        if active.round_times is not None:
            self._record_time(active.round_times, round_)
        with stopwatch:
            piece = self._text.feed(zip(round_.tokens, token_outcomes(round_), strict=True))
            active.done.append(round_)
            active.logprobs += round_.logprobs or ()
            active.num_new_tokens = len(self._text.tokens)
            if self._text.is_finished:
                self._on_end(active, self._text.tokens)
                self.cancel()
        if active.round_times is not None:
            self._seconds = stopwatch.total
        return piece


def run_together(
    slots: Slots, begins: Iterable[Callable[..., Stream]], limit: int | None = None
) -> Iterator[Generation | SpecEdgeError]:
    """Run streams in this thread, sharing passes; yield their results or errors in their order.

    Args:
        slots: Slots of the streams' pipeline.
        begins: Functions that begin the streams, with the argument `wait` of `Slots.lease`.
        limit: Maximum number of streams at a time; by default the number of slots.
    """
    limit = limit or len(slots.all)
    results: deque[_StreamResult] = deque()
    active: list[_StreamResult] = []
    try:
        for begin in begins:
            while len(active) >= limit:
                active = _read(slots, active)
            while results and (value := results[0].value) is not None:
                results.popleft()
                yield value
            result = _StreamResult()
            while not result.begin(begin, wait=not active):
                active = _read(slots, active)
            results.append(result)
            if result.value is None:
                active.append(result)
        for result in results:
            while (value := result.value) is None:
                active = _read(slots, active)
            yield value
    finally:
        for result in active:
            if result.stream is not None:
                result.stream.close()


class _StreamResult:
    """Stream until it has ended, then its generation or error."""

    stream: Stream | None = None
    value: Generation | SpecEdgeError | None = None

    def begin(self, begin: Callable[..., Stream], wait: bool) -> bool:
        """Begin the stream; return False if no slot is free."""
        try:
            self.stream = begin(wait=wait)
        except NoFreeSlotError:
            if wait:
                raise
            return False
        except SpecEdgeError as error:
            self.value = error
        return True

    def read(self) -> None:
        """Read the next round of the stream if it has one, or its end."""
        stream = self.stream
        if stream is None or not stream.job.is_done:
            return
        try:
            if stream.read() is None or stream.finish_reason != FinishReason.UNFINISHED:
                self.stream, self.value = None, stream.generation
        except SpecEdgeError as error:
            self.stream, self.value = None, error


def _read(slots: Slots, active: Sequence[_StreamResult]) -> list[_StreamResult]:
    """Read the streams that have a round or an end first; return those that go on."""
    slots.engine.wait([result.stream.job for result in active if result.stream is not None])
    for result in active:
        result.read()
    return [result for result in active if result.value is None]
