"""Plans of a request: drafter and K of each round, fixed, chosen by a planner, or replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from specedge.errors import ReplayError
from specedge.request import PLAIN, Coupling, DrafterName, GenerationRequest, PlannedRounds

from ..decoding.protocols import Drafter, Plan, Round, RoundPlan
from ..drafters.chain import Chain
from ..drafters.draft_model import DraftModel
from ..drafters.suffix import Guess, Suffix, count_accepted
from ..sampling.history import History
from .cost_files import PassCosts
from .planner import (
    BUDGET_SHARE,
    CHAIN,
    MODEL,
    SUFFIX,
    Offer,
    Planner,
    RoundChoice,
    RoundKind,
)

PLANNED = (MODEL, SUFFIX, CHAIN)  # drafters whose costs are known
PLANNING_SECONDS = 1e-4  # that planning a round takes; at most BUDGET_SHARE of the time is spent
BACKOFF_AFTER, MAX_BACKOFF = 2, 15  # plain choices before a back-off; its most unplanned rounds


def create_plan(
    request: GenerationRequest,
    drafters: Mapping[str, Drafter],
    costs: PassCosts,
    max_draft_tokens: int,
) -> Plan:
    """Return the plan of a request.

    Raises:
        ReplayError: A replay has drafters that are not available.
    """
    first = next(iter(drafters.values()))
    if request.replay is not None:
        depends_on_drafts = request.temperature > 0 and request.coupling == Coupling.RESIDUAL
        return ReplayPlan(request.replay, drafters, depends_on_drafts)
    if request.fixed_k is not None:
        return FixedPlan(first, request.fixed_k)
    planner = Planner(costs.table, request.temperature == 0, max_draft_tokens)
    return AutoPlan(planner, drafters)


class FixedPlan:
    """Plan with one drafter and one K."""

    def __init__(self, drafter: Drafter, num_draft_tokens: int) -> None:
        self.drafter = drafter
        self.max_draft_tokens = num_draft_tokens
        name = drafter.name if num_draft_tokens else PLAIN
        self._round_plan = RoundPlan(name, drafter, num_draft_tokens)

    def next(self, history: History, num_left: int) -> RoundPlan:
        """Return the plan of the next round."""
        return self._round_plan

    def record(self, round_: Round) -> None:
        """Learn nothing."""

    def truncate(self, length: int) -> None:
        """Roll the drafter back."""
        self.drafter.truncate(length)


class AutoPlan:
    """Plan by a planner, among a draft model, suffix decoding and both in a chain.

    In every planned round the guess of suffix decoding is compared with the text, which costs no
    pass. While nothing pays and rounds are so short that planning shows, rounds are plain without
    planning (exponential back-off).

    Attributes:
        changes: Choices that differ from those before them, with the round's number.
    """

    def __init__(self, planner: Planner, drafters: Mapping[str, Drafter]) -> None:
        self.planner = planner
        self.max_draft_tokens = planner.max_draft_tokens
        self.changes: list[tuple[int, RoundChoice]] = []
        self._drafters = drafters
        self._model = _draft_model(drafters)
        self._choice: RoundChoice | None = None
        self._round_plan: RoundPlan | None = None
        self._copied: list[int] = []  # tokens that suffix decoding would draft
        self._rates: Sequence[float] = ()  # that it predicts for them
        self._num_plain = 0  # planned rounds in a row in which nothing paid,
        self._backoff = 0  # plain rounds that are not planned, after the last planned one,
        self._num_unplanned = 0  # and how many of them are left
        self._length = 0  # of the text before the round
        self._num_read = 0  # of the text, by the model when it drafted the last tested token

    def next(self, history: History, num_left: int) -> RoundPlan:
        """Return the plan of the next round."""
        self._length = history.length
        if self._num_unplanned and self._round_plan is not None:
            self._num_unplanned, self._copied = self._num_unplanned - 1, []
            return self._round_plan
        choice = self.planner.choose(self._offers(history), history.length - 1)
        self._num_plain = self._num_plain + 1 if choice.kind == RoundKind.PLAIN else 0
        if self._num_plain > BACKOFF_AFTER:
            limit = int(PLANNING_SECONDS / (BUDGET_SHARE * choice.plain_seconds))
            self._backoff = min(2 * self._backoff + 1, limit, MAX_BACKOFF)
        else:
            self._backoff = 0
        self._num_unplanned = self._backoff
        self._note(choice)
        name = next(iter(self._drafters)) if choice.drafter == PLAIN else choice.drafter
        self._round_plan = RoundPlan(choice.drafter, self._drafters[name], choice.num_draft_tokens)
        return self._round_plan

    def record(self, round_: Round) -> None:
        """Learn from a round."""
        assert self._choice is not None
        if not self._copied and not round_.num_drafted:
            self.planner.record(self._choice, (), 0)
            return
        sources: Sequence[str] = round_.sources
        if round_.drafter not in PLANNED:
            sources = [round_.drafter] * round_.num_drafted
        num_accepted = round_.num_accepted
        self.planner.record(self._choice, sources, num_accepted)
        for i in range(min(num_accepted, len(sources) - 1), -1, -1):
            if sources[i] == MODEL:
                self._num_read = self._length + i
                break
        if self._copied:
            num_accepted = max(num_accepted, self._record_copy(round_.tokens, sources))
        if num_accepted:
            self._num_plain = 0

    def _record_copy(self, tokens: Sequence[int], sources: Sequence[str]) -> int:
        """Compare suffix decoding's guess, drafted or not, with the text; return what agrees."""
        num_accepted, num_tested = count_accepted(self._copied, tokens)
        estimate = self.planner.estimate(SUFFIX)
        if self._rates:
            estimate.record_predictions(self._rates[:num_tested], num_accepted)
        if SUFFIX not in sources:
            for i in range(num_tested):
                estimate.record(i, i < num_accepted)
        return num_accepted

    def truncate(self, length: int) -> None:
        """Roll the drafters back."""
        if length and self._choice is not None and self._choice.kind == RoundKind.PLAIN:
            return  # no drafter has read a draft
        self._num_read = min(self._num_read, length)
        for drafter in self._drafters.values():
            drafter.truncate(length)

    def _offers(self, history: History) -> list[Offer]:
        """Return the drafters' offers.

        A chain whose model is out of room offers its copy. Without a copy it offers the model's
        draft, and copies that the model's tokens may lead to: if these are accepted as often, the
        model alone is no better.
        """
        max_tokens = self.planner.max_draft_tokens
        behind = room = 0
        if self._model is not None:
            behind, room = self._model.backlog_and_room(history.length, self._num_read)
            if not history.num_new_tokens and self._is_long_catch_up(behind, history.length):
                room = 0
        guess = Guess([], [], 0, 0)
        if SUFFIX in self._drafters:
            guess = cast(Suffix, self._drafters[SUFFIX]).guess(history, max_tokens)
            self._copied, self._rates = guess.tokens[: guess.num_alone], guess.rates
        before_model = guess.num_before_model
        offers: list[Offer] = []
        for name in self._drafters:
            if name == MODEL:
                offers.append(Offer(MODEL, room=room, behind=behind))
            elif name == SUFFIX:
                offers.append(Offer(SUFFIX, SUFFIX, guess.num_alone, rates=self._rates))
            elif name == CHAIN:
                rest = max(0, room - before_model)
                offers.append(Offer(CHAIN, SUFFIX, before_model, rest, behind, self._rates))
            else:  # its cost is not known; a drafter without a model is nearly free
                offers.append(Offer(name, name, max_tokens))
        if not before_model and MODEL in self._drafters and CHAIN in self._drafters:
            copied, drafted = (self.planner.estimate(name).rate for name in (SUFFIX, MODEL))
            worse = MODEL if copied >= drafted else CHAIN
            offers = [offer for offer in offers if offer.drafter != worse]
        return offers

    def _is_long_catch_up(self, behind: int, length: int) -> bool:
        """Return True if the model's catch-up takes longer than a pass of the target.

        Then the first token, which the target's own pass gives, does not wait for it.
        """
        costs = self.planner.costs(length - 1)
        return costs.catch_up(behind) > costs.plain

    def _note(self, choice: RoundChoice) -> None:
        last, self._choice = self._choice, choice
        if last is None or (last.drafter, last.num_draft_tokens, last.kind) != (
            choice.drafter,
            choice.num_draft_tokens,
            choice.kind,
        ):
            self.changes.append((self.planner.kinds.total() + 1, choice))


class ReplayPlan:
    """Plan with the rounds of an earlier request.

    Rounds of `lookup` are of version 0.1, whose prompt lookup drafted other tokens than suffix
    decoding. They are replayed where the text does not depend on drafts; the last round is repeated
    if fewer tokens are accepted.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[Any]],
        drafters: Mapping[str, Drafter],
        depends_on_drafts: bool = True,
    ) -> None:
        self._repeats_last = any(name == DrafterName.LOOKUP for name, _, _ in rounds)
        if self._repeats_last:
            if depends_on_drafts:
                raise ReplayError(
                    "the replay has rounds of 'lookup' of specedge 0.1, which are replayed at "
                    "temperature 0 or with coupling 'gumbel' only"
                )
            rounds = [(SUFFIX, *r[1:]) if r[0] == DrafterName.LOOKUP else r for r in rounds]
        # A caller's own drafter is recorded by its name where K is fixed.
        drafters = {drafter.name: drafter for drafter in drafters.values()} | {**drafters}
        for name, _, _ in rounds:
            if name != PLAIN and name not in drafters:
                raise ReplayError(
                    f"the replay has rounds of '{name}', available are {', '.join(drafters)}; "
                    "replay with the bundle and options of the earlier request"
                )
        self.max_draft_tokens = max(k for _, k, _ in rounds)
        self._drafters = drafters
        self._rounds = [(name, k) for name, k, count in rounds for _ in range(count)]
        self._num_done = 0

    def next(self, history: History, num_left: int) -> RoundPlan:
        """Return the plan of the next round."""
        if self._num_done == len(self._rounds) and self._repeats_last:
            self._num_done -= 1
        if self._num_done == len(self._rounds):
            raise ReplayError(
                f"the replay ends after {self._num_done} rounds, {num_left} tokens early; "
                "replay with the prompt, seed and options of the earlier request"
            )
        name, k = self._rounds[self._num_done]
        self._num_done += 1
        drafter = self._drafters.get(name) or next(iter(self._drafters.values()))
        return RoundPlan(name, drafter, k)

    def record(self, round_: Round) -> None:
        """Learn nothing."""

    def truncate(self, length: int) -> None:
        """Roll the drafters back."""
        for drafter in self._drafters.values():
            drafter.truncate(length)


def _draft_model(drafters: Mapping[str, Drafter]) -> DraftModel | None:
    """Return the draft model, alone or at a chain's end."""
    drafter = drafters.get(MODEL)
    if drafter is None and isinstance(chain := drafters.get(CHAIN), Chain):
        drafter = chain.drafters[-1]
    return drafter if isinstance(drafter, DraftModel) else None


def summarize_rounds(rounds: Sequence[Round]) -> list[PlannedRounds]:
    """Return drafter, K and count of equal rounds in a row, as a replay takes them."""
    summary: list[PlannedRounds] = []
    for round_ in rounds:
        name, k = round_.drafter, round_.num_draft_tokens
        if summary and summary[-1][:2] == (name, k):
            summary[-1] = (name, k, summary[-1][2] + 1)
        else:
            summary.append((name, k, 1))
    return summary
