"""One request as it runs: its rounds, the text they make certain, and what it gave."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from specedge.errors import SpecEdgeError
from specedge.options import Sampling
from specedge.request import AUTO, Planned, Request

from .decoding import Round, SpeculativeDecoder
from .drafters import Drafter
from .fates import Fate, Marks, Span, fates
from .known_costs import Seen
from .logprobs import TokenLogprobs
from .near_ties import NearTie, Referee
from .noise import ANY
from .planner import MODEL, Planner
from .plans import Auto, Fixed, Plan, Replay, recorded
from .stats import Recorder, Stats, Stopwatch, Timed
from .text import Detokenizer, StopStrings
from .turns import Turn

if TYPE_CHECKING:
    from .pipeline import Pipeline


@dataclass(frozen=True)
class Generation:
    """What a request gave.

    `text` is the continuation alone, without the end token or stop string that ended it; `tokens`
    are the new ids, that end token or those of the stop string included. `finish_reason` is
    "length" (`max_new_tokens`), "end" (an end token), "stop" (a stop string), "context" (no room
    left), or "unfinished". `seed` repeats the request. `spans` are `text` by token, with what
    became of each: accepted, recovered, bonus, or plain. `logprobs` has an entry for each of
    `tokens` if they were asked for. `lossy` names what made the text follow another law than the
    target's, None where nothing did. `drafter` is the drafter's name. `plan` is the drafter and K
    of every round, equal ones in a row counted together, as the option `replay` takes it. If rounds
    were planned, `expected_speedup` is what they gained over the target alone, by the table of
    costs.

    `near_ties` are greedy choices that the device's noise may have turned. `noise` is what was
    reckoned with: by how much a logit may differ from plain decoding's, 0 if by no bit.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    seed: int
    num_draft_tokens: int | str
    drafter: str
    plan: list[Planned]
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

    It has its pipeline's turn from the start to the end of its text, or until it is closed,
    cancelled or dropped.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        turn: Turn,
        request: Request,
        *,
        prompt: list[int],
        sampling: Sampling,
        seed: int,
        max_new_tokens: int,
        stops: tuple[str, ...],
        ends: frozenset[int],
    ) -> None:
        self._pipeline = pipeline
        self._turn = turn
        self._request, self._prompt, self._sampling = request, prompt, sampling
        self._seed = seed
        self._ends = ends
        room = pipeline.bundle.context_length - len(prompt)
        self._limit = min(max_new_tokens, room)
        self._limit_reason = "length" if max_new_tokens <= room else "context"
        self._watch = Stopwatch()
        self._target = Timed(pipeline.target, self._watch, "verify")
        self._again = Timed(pipeline.target, self._watch, "exact")
        self._draft = Timed(pipeline.draft, self._watch, "draft")
        self._greedy = sampling.greedy
        fixed = k if isinstance(k := request.num_draft_tokens, int) else 0
        self._num_draft_tokens: int | str = k if isinstance(k, int) else AUTO
        drafter, self.plan = self._plan(request)
        planned = (request.drafter, self._num_draft_tokens) == (AUTO, AUTO)
        self._drafter = AUTO if planned else drafter.name
        self._decoder = SpeculativeDecoder(
            self._target, drafter, fixed, self._watch, plan=self.plan
        )
        self._noise = 0.0
        self._rounds: Generator[Round] | None = None  # begun with the first piece
        self._cancelled = False
        self._recorder = Recorder(len(prompt), fixed, self._watch)
        self._detokenizer = Detokenizer(pipeline.tokenizer, prompt)
        self._stop_strings = StopStrings(stops)
        self._lossy = sampling.lossy if self._num_draft_tokens else None
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.logprobs is None else []
        self._marks = Marks()
        self._spans: list[list[Span]] = []
        self._past_rounds: list[Round] = []
        self._finish_reason = "unfinished"

    def _plan(self, request: Request) -> tuple[Drafter, Plan]:
        """What drafts, and what decides how much; ways of drafting that cannot be are errors."""
        drafters = self._pipeline.drafters.offered(request, self._draft)
        first = next(iter(drafters.values()))
        if request.replay is not None:
            return first, Replay(request.replay, drafters)
        if isinstance(k := request.num_draft_tokens, int):
            return first, Fixed(first, k)
        most = self._pipeline.max_planned_tokens
        greedy, costs = request.temperature == 0, self._pipeline.costs
        planner = Planner(costs.table if greedy else costs.settled_table, greedy, most)
        return first, Auto(planner, drafters)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        turns = self._pipeline.turns
        while self._finish_reason == "unfinished" and not self._cancelled:
            if not turns.is_held(self._turn):
                raise SpecEdgeError("this stream ended when its pipeline began another request")
            try:
                with turns.round, self._watch.part("other"):
                    piece = self._next_piece()
            except BaseException:
                self.cancel()
                raise
            if self._cancelled or self._finish_reason != "unfinished":
                self.cancel()
            if piece:
                return piece
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def traced(self) -> Iterator[list[Span]]:
        """The pieces as spans: the text of each token, with what became of the token."""
        for _ in self:
            yield self._spans[-1]

    def close(self) -> None:
        """Stop here; `generation` holds what there is."""
        self.cancel()

    def cancel(self) -> None:
        """Stop here, or after the round that a thread is in; that thread looks when it is done."""
        self._cancelled = True
        turns = self._pipeline.turns
        if turns.round.acquire(blocking=False):
            try:
                if self._rounds is not None:
                    self._rounds.close()
                turns.give_back(self._turn)
            finally:
                turns.round.release()

    @property
    def generation(self) -> Generation:
        """What there is so far."""
        stats = self._recorder.stats(
            self._draft.num_passes, self._target.num_passes, self._again.num_passes
        )
        ties = (tie for round_ in self._past_rounds for tie in round_.near_ties)
        spans = [span for piece in self._spans for span in piece]
        return Generation(
            "".join(span.text for span in spans),
            list(self._tokens),
            self._finish_reason,
            self._seed,
            self._num_draft_tokens,
            self._drafter,
            recorded(self._past_rounds),
            self.plan.planner.expected_speedup if isinstance(self.plan, Auto) else None,
            stats,
            list(self._past_rounds),
            spans,
            None if self._logprobs is None else list(self._logprobs),
            self._lossy,
            [tie for tie in ties if tie.position < len(self._tokens)],
            self._noise,
        )

    def _begin(self) -> Generator[Round]:
        """The rounds; where wider passes have other last bits, greedy ones have a referee."""
        request, prompt, sampling = self._request, self._prompt, self._sampling
        if sampling.greedy:
            exact, k = request.exact, self.plan.max_draft_tokens
            with self._watch.part("noise"):
                self._noise = self._pipeline.noise.bound(prompt, k, trusting=not exact)
            if exact and self._noise == ANY:
                raise SpecEdgeError(
                    "this target chooses among experts, and on this device its passes of several "
                    "tokens have other last bits than those of one, which may turn a choice; take "
                    "0 draft tokens to be exact"
                )
            if self._noise:
                self._decoder.referee = Referee(self._again, self._noise, exact)
        return self._decoder.rounds(prompt, sampling, self._seed, self._limit, request.logprobs)

    def _next_piece(self) -> str:
        """What the next round adds to the text."""
        if self._rounds is None:
            self._rounds = self._begin()
        round_ = next(self._rounds, None)
        if round_ is None:  # it was closed meanwhile
            self._cancelled = True
            return ""
        before = len(self._tokens)
        taken = zip(round_.tokens, fates(round_), strict=True)
        piece = "".join(self._take(token, fate) for token, fate in taken)
        if self._finish_reason != "unfinished":
            piece += self._flush()
        num_taken = len(self._tokens) - before
        if self._logprobs is not None:
            self._logprobs += (round_.logprobs or [])[:num_taken]
        self._recorder.record(round_, num_taken)
        self._past_rounds.append(round_)
        self._spans.append(self._marks.take(len(piece)))
        if self._finish_reason != "unfinished":
            self._pipeline.costs.learn(self.seen)  # for the next requests
        return piece

    @property
    def seen(self) -> Seen:
        """What the rounds so far cost, for a table of costs."""
        stats = self.generation.stats
        return Seen(
            greedy=self._greedy,
            target=self._target.firsts,
            draft=self._draft.rounds,
            firsts=self._draft.firsts,
            host=(stats.sampling_seconds + stats.other_seconds) / max(1, stats.num_rounds),
            num_tested=stats.tested_by_source.get(MODEL, 0),
            num_accepted=stats.accepted_by_source.get(MODEL, 0),
        )

    def _take(self, token: int, fate: Fate) -> str:
        """Add one token unless the text has ended; the text it makes certain."""
        if self._finish_reason != "unfinished":
            return ""
        self._tokens.append(token)
        if token in self._ends:
            self._finish_reason = "end"
            return ""
        text = self._detokenizer.feed(token)
        self._marks.add(text, fate)
        text = self._stop_strings.feed(text)
        if self._stop_strings.found:
            self._finish_reason = "stop"
        elif len(self._tokens) == self._limit:
            self._finish_reason = self._limit_reason
        return text

    def _flush(self) -> str:
        """Text held back until now."""
        text = self._detokenizer.flush()
        self._marks.add_rest(text)
        text = self._stop_strings.feed(text)
        if self._stop_strings.found:
            self._finish_reason = "stop"
        return text + self._stop_strings.flush()
