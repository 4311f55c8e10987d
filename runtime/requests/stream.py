"""The pieces of a request's text, as they become certain, and what the request gave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

from specedge.errors import SpecEdgeError
from specedge.request import AUTO, PlannedRounds

from ..decoding.protocols import NearTie, Plan, Round
from ..planning.plans import summarize_rounds
from ..sampling.logprobs import TokenLogprobs
from ..text.assembler import Assembler, FinishReason
from ..text.spans import Span, fates
from .run import Run
from .slots import Slots
from .stats import Stats


@dataclass(frozen=True)
class Generation:
    """What a request gave.

    `text` is the continuation alone, without the end token or stop string that ended it; `tokens`
    are the new ids, that end token or those of the stop string included. `finish_reason` is
    "length" (`max_new_tokens`), "end" (an end token), "stop" (a stop string), "context" (no room
    left), or "unfinished". `seed` repeats the request. `spans` are `text` by token, with what
    became of each: accepted, recovered, bonus, or plain. `logprobs` has an entry for each of
    `tokens` if they were asked for. `lossy` names what made the text follow another distribution
    than the target's, None where nothing did. `drafter` is the drafter's name. `plan` is the
    drafter and K of every round, equal ones in a row counted together, as the option `replay` takes
    it. If rounds were planned, `expected_speedup` is what they gained over the target alone, by the
    table of costs.

    `near_ties` are greedy choices that the device's noise may have turned. `noise` is what was
    reckoned with: by how much a logit may differ from plain decoding's, 0 if by no bit.
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
    spans: list[Span] = field(repr=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)
    lossy: str | None = None
    near_ties: list[NearTie] = field(default_factory=list)
    noise: float = 0.0


class Stream:
    """The pieces of a request's text, as they become certain. Close it or leave it at any time.

    It owns a slot from the start to the end of its text, or until it is closed, cancelled or
    garbage-collected, whichever threads read it; its rounds take turns with those of other slots.
    `learn` is told of the run and of the new tokens when the text has ended.
    """

    def __init__(
        self, run: Run, text: Assembler, slots: Slots, learn: Callable[[Run, list[int]], None]
    ) -> None:
        self._run, self._text, self._slots, self._learn = run, text, slots, learn
        self._rounds: Generator[Round | None] = run.rounds()
        self._reading = threading.Lock()  # held by a reader, before it waits for a turn
        self._running = threading.Lock()  # held for a round
        self._cancelled = False
        self._chunk_seconds: float | None = None  # of the turn, if it read a part of the prompt

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not (self._text.finished or self._cancelled):
            try:
                # A second reader must not hold a turn: the first one's round may wait for it.
                with (
                    self._reading,
                    self._slots.turns,
                    self._running,
                    self._run.watch.part("other"),
                ):
                    piece = self._next_piece()
            except BaseException:
                self.cancel()
                raise
            if self._cancelled or self._text.finished:
                self.cancel()
            if piece:
                return piece
            self._share_turns()
        raise StopIteration

    def _share_turns(self) -> None:
        """After a part of a long prompt, let other streams have turns for as long as it took."""
        if self._chunk_seconds is not None and self._slots.has_others(self):
            self._slots.turns.wait_for_others(self._chunk_seconds, lambda: self._cancelled)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def traced(self) -> Iterator[list[Span]]:
        """The pieces as spans: the text of each token, with what became of the token."""
        for _ in self:
            yield self._text.spans[-1]

    def close(self) -> None:
        """Stop here; `generation` holds what there is."""
        self.cancel()

    def cancel(self) -> None:
        """Stop here, or after the round that a thread is in; that thread looks when it is done."""
        self._cancelled = True
        if self._running.acquire(blocking=False):
            try:
                self._rounds.close()
                self._slots.give_back(self)
            finally:
                self._running.release()

    @property
    def plan(self) -> Plan:
        """What decides each round."""
        return self._run.plan

    @property
    def finish_reason(self) -> FinishReason:
        """Why the text has ended, if it has."""
        return self._text.finish_reason

    @property
    def num_rounds(self) -> int:
        """How many rounds there were so far."""
        return len(self._run.done)

    @property
    def stats(self) -> Stats:
        """What was done so far."""
        return self._run.stats

    @property
    def generation(self) -> Generation:
        """What there is so far."""
        run, text, rounds = self._run, self._text, self._run.done
        k = run.request.fixed_k
        spans = [span for piece in text.spans for span in piece]
        return Generation(
            text="".join(span.text for span in spans),
            tokens=list(text.tokens),
            finish_reason=text.finish_reason,
            seed=run.seed,
            num_draft_tokens=AUTO if k is None else k,
            drafter=run.drafter,
            plan=summarize_rounds(rounds),
            expected_speedup=run.expected_speedup,
            stats=run.stats,
            rounds=list(rounds),
            spans=spans,
            logprobs=None if run.request.logprobs is None else self.logprobs(),
            lossy=None if k == 0 else run.sampling.lossy,
            near_ties=[t for r in rounds for t in r.near_ties if t.position < len(text.tokens)],
            noise=run.logit_noise,
        )

    def tokens(self, start: int = 0) -> list[int]:
        """Return the tokens so far from `start` on."""
        return self._text.tokens[start:]

    def logprobs(self, start: int = 0) -> list[TokenLogprobs]:
        """Those of the tokens so far from one on, if they were asked for."""
        return self._run.logprobs[start : len(self._text.tokens)]

    def _next_piece(self) -> str:
        """Return what the next round adds to the text; nothing, if more of the prompt was read."""
        if self._cancelled:  # while this thread waited for its turn
            return ""
        if not self._slots.all:
            raise SpecEdgeError("this stream ended when its pipeline was closed")
        start = time.perf_counter()
        round_ = next(self._rounds)
        self._chunk_seconds = time.perf_counter() - start if round_ is None else None
        if round_ is None:
            return ""
        piece = self._text.feed(zip(round_.tokens, fates(round_), strict=True))
        self._run.done.append(round_)
        self._run.logprobs += round_.logprobs or ()
        self._run.num_new_tokens = len(self._text.tokens)
        if self._text.finished:
            self._learn(self._run, self._text.tokens)
        return piece
