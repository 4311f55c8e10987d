"""Plans of a request: drafter and K of each round, fixed, chosen by a planner, or replayed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median
from typing import Any, cast

from specedge.errors import ReplayError
from specedge.request import BLOCK, PLAIN, Coupling, DrafterName, GenerationRequest, PlannedRounds
from specedge.sampling_options import Sampling

from ..decoding.protocols import Drafter, Plan, Round, RoundPlan, StateObserver
from ..drafters.chain import Chain
from ..drafters.draft_head import DraftHead
from ..drafters.draft_model import DraftModel, ParallelDraftModel
from ..drafters.suffix import Prediction, Suffix, count_accepted
from ..sampling.history import History
from .cost_table import CostTable
from .planner import (
    BUDGET_SHARE,
    CHAIN,
    MODEL,
    SUFFIX,
    ChoiceReason,
    DraftOption,
    Planner,
    RoundChoice,
)

PLANNED = (MODEL, SUFFIX, CHAIN)  # drafters with measured costs
PLANNING_SECONDS = 1e-4  # time to plan a round; limited to BUDGET_SHARE of the time by back-off
BACKOFF_AFTER, MAX_BACKOFF = 2, 15  # plain choices before a back-off, and its maximum in rounds
MIN_TIMED_ROUNDS = 16  # rounds of each compared drafter
MAX_TIME_RATIO = 1.25  # of two drafters' median ratios of measured to predicted time
MAX_LENGTH_RATIO = 4  # longest text to judge, relative to the longest timed cache


def create_plan(
    request: GenerationRequest,
    drafters: Mapping[str, Drafter],
    table: CostTable,
    max_draft_tokens: int,
    num_requests: Callable[[], int] = lambda: 1,
) -> Plan:
    """Return the plan of a request.

    Args:
        request: The request.
        drafters: Its drafters by name.
        table: Measured costs.
        max_draft_tokens: Largest K of a planner.
        num_requests: Function that returns the number of requests that share passes. It is not
            called if the text depends on K: then it must not depend on other requests either.

    Raises:
        ReplayError: The replay has drafters that are not available.
    """
    first = next(iter(drafters.values()))
    depends_on_drafts = request.temperature > 0 and request.coupling == Coupling.RESIDUAL
    if request.replay is not None:
        return ReplayPlan(request.replay, drafters, depends_on_drafts)
    if request.fixed_k is not None:
        return FixedPlan(first, request.fixed_k)
    planner = Planner(table, request.temperature, max_draft_tokens)
    return AutoPlan(planner, drafters, (lambda: 1) if depends_on_drafts else num_requests)


class FixedPlan:
    """Plan with one drafter and one K."""

    def __init__(self, drafter: Drafter, num_draft_tokens: int) -> None:
        self.drafter = drafter
        self.max_draft_tokens = num_draft_tokens
        name = drafter.name if num_draft_tokens else PLAIN
        self._round_plan = _round_plan(name, drafter, num_draft_tokens)

    def begin(self, history: History) -> StateObserver | None:
        self.truncate(0)
        return self.drafter.observer if self.max_draft_tokens else None

    def next(self, history: History, num_left: int) -> RoundPlan:
        return self._round_plan

    def record(self, round_: Round) -> None:
        """Ignore the outcome."""

    def truncate(self, length: int) -> None:
        self.drafter.truncate(length)


class AutoPlan:
    """Adaptive plan: a planner selects the draft model, suffix decoding, a chain of both, or none.

    In every planned round the prediction of suffix decoding is compared with the text, which needs
    no pass. While no draft is faster and rounds are short relative to the planning time, rounds are
    plain and not planned (exponential back-off).

    Attributes:
        changes: Choices that differ from the previous one, with the round's number.
    """

    def __init__(
        self,
        planner: Planner,
        drafters: Mapping[str, Drafter],
        num_requests: Callable[[], int] = lambda: 1,
    ) -> None:
        self._planner = planner
        self._num_requests = num_requests
        self.max_draft_tokens = planner.max_draft_tokens
        self.changes: list[tuple[int, RoundChoice]] = []
        self._drafters = drafters
        self._model = _draft_model(drafters)
        self._reads_states = isinstance(self._model, DraftHead)
        self._is_off = False  # True if a draft head does not observe the text
        self._choice: RoundChoice | None = None
        self._round_plan: RoundPlan | None = None
        self._suffix_tokens: list[int] = []  # draft of suffix decoding, used or not
        self._suffix_rates: Sequence[float] = ()  # their predicted acceptance rates
        self._num_plain = 0  # consecutive planned rounds with K = 0
        self._backoff = 0  # rounds without planning after the last planned one
        self._num_unplanned = 0  # how many of them remain
        self._num_unrecorded = 0  # how many of them are done and not yet recorded
        self._is_planned = False  # True if the round was planned
        self._length = 0  # length of the text before the round
        self._num_read = 0  # length of the text when the model drafted the last tested token

    @property
    def planner(self) -> Planner:
        """Planner, which has recorded all rounds so far."""
        if self._num_unrecorded:
            assert self._choice is not None
            num_rounds, self._num_unrecorded = self._num_unrecorded, 0
            self._planner.record_plain(self._choice, num_rounds)
        return self._planner

    @property
    def choice(self) -> RoundChoice | None:
        """Choice of the current round, planned or not; None before the first."""
        return self._choice

    def begin(self, history: History) -> StateObserver | None:
        """Begin a text.

        A draft head reads the prompt now or never. It stays off if this is not expected to pay.
        """
        self.truncate(0)
        self._num_read = 0
        if self._model is None or not self._reads_states:
            return None
        limit = self._model.context_length
        num_prompt_tokens = min(history.length, limit)
        option = DraftOption(MODEL, MODEL, 0, limit, num_prompt_tokens, reads_states=True)
        self._is_off = not self.planner.invest(option, history.length - 1)
        if self._is_off:
            return None
        self._num_read = history.length
        return self._model.observer

    def next(self, history: History, num_left: int) -> RoundPlan:
        if self._num_unplanned and self._round_plan is not None:
            self._num_unplanned -= 1
            self._is_planned = False
            return self._round_plan
        self._is_planned = True
        self._length = history.length
        self.planner.num_requests = self._num_requests()
        choice = self.planner.choose(self._options(history), history.length - 1)
        self._num_plain = self._num_plain + 1 if choice.reason == ChoiceReason.PLAIN else 0
        if self._num_plain > BACKOFF_AFTER:
            limit = int(PLANNING_SECONDS / (BUDGET_SHARE * choice.plain_seconds))
            self._backoff = min(2 * self._backoff + 1, limit, MAX_BACKOFF)
        else:
            self._backoff = 0
        self._num_unplanned = self._backoff
        if choice is not self._choice or self._round_plan is None:
            self._set_choice(choice)
            name = next(iter(self._drafters)) if choice.drafter == PLAIN else choice.drafter
            drafter = self._drafters[name]
            k, min_confidence = choice.num_draft_tokens, 0.0
            if isinstance(drafter, DraftModel) and self._ends_early(choice, drafter):
                _, limit = drafter.backlog_and_limit(history, self._num_read)
                k, min_confidence = self.planner.early_end(choice, limit)
            self._round_plan = _round_plan(choice.drafter, drafter, k, min_confidence)
        return self._round_plan

    def _ends_early(self, choice: RoundChoice, drafter: DraftModel) -> bool:
        is_known = bool(drafter.confidence_rates(self.planner.temperature == 0))
        return choice.reason == ChoiceReason.GAIN and is_known and not drafter.drafts_on_device

    def record(self, round_: Round) -> None:
        if not self._is_planned:
            self._num_unrecorded += 1
            return
        assert self._choice is not None
        if not self._suffix_tokens and not round_.num_drafted:
            self.planner.record(self._choice, (), 0)
            return
        sources: Sequence[str] = round_.sources
        if round_.drafter not in PLANNED:
            sources = [round_.drafter] * round_.num_drafted
        num_accepted = round_.num_accepted
        self.planner.record(self._choice, sources, num_accepted)
        for i in range(min(num_accepted, len(sources) - 1), -1, -1):
            if sources[i] == MODEL:
                # Heads and parallel drafts read tokens that they have drafted again.
                is_read_again = self._reads_states or isinstance(self._model, ParallelDraftModel)
                self._num_read = self._length + (0 if is_read_again else i)
                break
        if self._suffix_tokens:
            num_accepted = max(num_accepted, self._record_suffix(round_.tokens, sources))
        if num_accepted:
            self._num_plain = 0

    def _record_suffix(self, tokens: Sequence[int], sources: Sequence[str]) -> int:
        """Compare the prediction of suffix decoding with the text; return the number that agree."""
        num_accepted, num_tested = count_accepted(self._suffix_tokens, tokens)
        estimate = self.planner.estimate(SUFFIX)
        if self._suffix_rates:
            estimate.record_predictions(self._suffix_rates[:num_tested], num_accepted)
        if SUFFIX not in sources:
            for i in range(num_tested):
                estimate.record(i, i < num_accepted)
        return num_accepted

    def truncate(self, length: int) -> None:
        self._num_read = min(self._num_read, length)
        for drafter in self._drafters.values():
            drafter.truncate(length)

    def _options(self, history: History) -> list[DraftOption]:
        """Return the drafts that the drafters could propose.

        If the model's context is full, a chain has the tokens of suffix decoding only. A draft head
        drafts from the second round on. If suffix decoding predicts none, a chain is the model's
        draft followed by matches of its tokens, and is preferred to the model if suffix decoding is
        accepted at least as often.
        """
        max_tokens = self.planner.max_draft_tokens
        num_unread = max_model_tokens = max_unread = 0
        if self._model is not None:
            max_unread = self._model.max_unread
            num_unread, max_model_tokens = self._model.backlog_and_limit(history, self._num_read)
            costs = self.planner.costs(history.length - 1)
            is_long = costs.catch_up(num_unread, max_unread) > costs.plain
            is_first = not history.num_new_tokens
            if self._is_off or (is_first and (self._reads_states or is_long)):
                max_model_tokens = 0  # a catch-up longer than a pass would delay the first token
        prediction = Prediction([], [], 0, 0)
        if SUFFIX in self._drafters:
            prediction = cast(Suffix, self._drafters[SUFFIX]).predict(history, max_tokens)
            self._suffix_tokens = prediction.tokens[: prediction.num_standalone]
            self._suffix_rates = prediction.rates
        num_suffix, rates = prediction.num_before_model, self._suffix_rates
        worse = None
        if not num_suffix and MODEL in self._drafters and CHAIN in self._drafters:
            suffix_rate, model_rate = (self.planner.estimate(n).rate for n in (SUFFIX, MODEL))
            worse = MODEL if suffix_rate >= model_rate else CHAIN
        options: list[DraftOption] = []
        for name in self._drafters:
            if name == worse or (name == SUFFIX and not prediction.num_standalone):
                continue
            if name == MODEL:
                tokens = 0, max_model_tokens, num_unread, max_unread
                option = DraftOption(MODEL, MODEL, *tokens, reads_states=self._reads_states)
                options.append(option)
            elif name == SUFFIX:
                num_free = prediction.num_standalone
                options.append(DraftOption(SUFFIX, SUFFIX, num_free, predicted_rates=rates))
            elif name == CHAIN:
                rest = max(0, max_model_tokens - num_suffix)
                tokens = num_suffix, rest, num_unread, max_unread
                option = DraftOption(CHAIN, SUFFIX, *tokens, rates, self._reads_states)
                options.append(option)
            else:  # costs are not measured; a drafter without a model is nearly free
                options.append(DraftOption(name, name, max_tokens))
        return options

    def _set_choice(self, choice: RoundChoice) -> None:
        previous, self._choice = self._choice, choice
        if previous is None or (
            (previous.drafter, previous.num_draft_tokens, previous.reason)
            != (choice.drafter, choice.num_draft_tokens, choice.reason)
        ):
            self.changes.append((self.planner.reason_counts.total() + 1, choice))


class ReplayPlan:
    """Plan with the rounds of an earlier request.

    Rounds of `lookup` were recorded by version 0.1, whose prompt lookup drafted other tokens. They
    are replayed only if the text does not depend on drafts, and the last round is repeated if fewer
    tokens are accepted.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[Any]],
        drafters: Mapping[str, Drafter],
        depends_on_drafts: bool = True,
    ) -> None:
        self._repeats_last = any(name == DrafterName.LOOKUP for name, *_ in rounds)
        if self._repeats_last:
            if depends_on_drafts:
                raise ReplayError(
                    "the replay has rounds of 'lookup' from specedge 0.1, which can be replayed at "
                    "temperature 0 or with coupling 'gumbel' only"
                )
            rounds = [(SUFFIX, *r[1:]) if r[0] == DrafterName.LOOKUP else r for r in rounds]
        # With a fixed K, a custom drafter is recorded by its name.
        drafters = {drafter.name: drafter for drafter in drafters.values()} | {**drafters}
        for name, *_ in rounds:
            if name != PLAIN and name not in drafters:
                raise ReplayError(
                    f"the replay has rounds of '{name}', but only {', '.join(drafters)} are "
                    "available; replay with the bundle and options of the earlier request"
                )
        self.max_draft_tokens = max(k for _, k, *_ in rounds)
        self._drafters = drafters
        self._rounds = [
            (name, k, BLOCK in rules, sum(rule for rule in rules if rule != BLOCK))
            for name, k, count, *rules in rounds
            for _ in range(count)
        ]
        self._num_done = 0

    def next(self, history: History, num_left: int) -> RoundPlan:
        if self._num_done == len(self._rounds) and self._repeats_last:
            self._num_done -= 1
        if self._num_done == len(self._rounds):
            raise ReplayError(
                f"the replay ends after {self._num_done} rounds, {num_left} tokens early; "
                "replay with the prompt, seed and options of the earlier request"
            )
        name, k, is_block, min_confidence = self._rounds[self._num_done]
        self._num_done += 1
        drafter = self._drafters.get(name) or next(iter(self._drafters.values()))
        return replace(_round_plan(name, drafter, k, min_confidence), is_block=is_block)

    def begin(self, history: History) -> StateObserver | None:
        self.truncate(0)
        used = {name for name, k, *_ in self._rounds if k}
        observers = (self._drafters[name].observer for name in used)
        return next((observer for observer in observers if observer is not None), None)

    def record(self, round_: Round) -> None:
        """Ignore the outcome."""

    def truncate(self, length: int) -> None:
        for drafter in self._drafters.values():
            drafter.truncate(length)


class RoundTimes:
    """Ratios of measured to predicted times of a request's rounds, by drafter.

    Only the ratio between drafters is judged: contention slows all rounds down alike, which
    changes no choice. Times are recorded during a request and judged after it; no choice depends on
    them.
    """

    def __init__(self, table: CostTable, greedy: bool) -> None:
        self.table = table
        self._greedy = greedy
        self._ratios: defaultdict[str, list[float]] = defaultdict(list)

    def record(self, choice: RoundChoice, round_: Round, length: int, seconds: float) -> None:
        """Record a round with `length` tokens of text, unless its costs were not measured.

        Those of catch-ups, shortened drafts and long texts are extrapolated.
        """
        is_long = length > MAX_LENGTH_RATIO * self.table.lengths[-1]
        if choice.catch_up_seconds or is_long or round_.num_drafted != choice.num_draft_tokens:
            return
        token = self.table.mode(self._greedy).token
        predicted = choice.seconds + token * len(round_.tokens)
        self._ratios[choice.drafter].append(seconds / predicted)

    @property
    def contradicts_table(self) -> bool:
        """True if the ratios of two drafters disagree."""
        medians = [
            median(ratios) for ratios in self._ratios.values() if len(ratios) >= MIN_TIMED_ROUNDS
        ]
        return len(medians) > 1 and max(medians) > MAX_TIME_RATIO * min(medians)


def create_round_times(plan: Plan, sampling: Sampling, has_logprobs: bool) -> RoundTimes | None:
    """Return the times of a request; None if its costs were not measured.

    Costs are measured without filters, modified logits and log-probabilities.
    """
    measured = Sampling(sampling.temperature, end_tokens=sampling.end_tokens)
    is_measured = sampling == measured and (sampling.constraint or sampling.noise) is None
    if not isinstance(plan, AutoPlan) or not is_measured or has_logprobs:
        return None
    return RoundTimes(plan.planner.table, sampling.greedy)


def _draft_model(drafters: Mapping[str, Drafter]) -> DraftModel | None:
    """Return the draft model, used alone or as the last drafter of a chain."""
    drafter = drafters.get(MODEL)
    if drafter is None and isinstance(chain := drafters.get(CHAIN), Chain):
        drafter = chain.drafters[-1]
    return drafter if isinstance(drafter, DraftModel) else None


def summarize_rounds(rounds: Sequence[Round]) -> list[PlannedRounds]:
    """Return drafter, K and count of each run of equal rounds, the format of a replay."""
    groups = groupby(rounds, _planned)
    return [(name, k, len(list(group)), *rules) for (name, k, rules), group in groups]


def _planned(round_: Round) -> tuple[str, int, list[str | float]]:
    """Return drafter and K of a round, BLOCK if it was, and the minimum confidence above 0."""
    rules: list[str | float] = [BLOCK] * round_.is_block
    rules += [round_.min_confidence] * (round_.min_confidence > 0)
    return round_.drafter, round_.num_draft_tokens, rules


def _round_plan(name: str, drafter: Drafter, k: int, min_confidence: float = 0.0) -> RoundPlan:
    return RoundPlan(name, drafter, k, k > 1 and drafter.is_sampled, min_confidence)
