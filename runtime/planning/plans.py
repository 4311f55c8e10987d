"""Who drafts how many tokens in each round of a request: fixed, planned, or as recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specedge.errors import ReplayError
from specedge.request import GenerationRequest, PlannedRounds
from specedge.sampling_options import MAX_DRAFT_TOKENS, Sampling

from ..decoding.protocols import Drafter, Plan, Round, RoundPlan
from ..drafters.chain import Chain
from ..drafters.draft_model import DraftModel
from ..drafters.prompt_lookup import agreeing
from ..drafters.suffix import Suffix
from ..sampling.history import History
from .choices import CHAIN, COPYING, MODEL, PLAIN, Choice, Kind, Offer
from .known_costs import KnownCosts
from .planner import SHARE, Planner

PLANNED = (MODEL, *COPYING, CHAIN)  # whose costs are known
_CERTAIN, _NO_CHANCE = Sampling(), np.zeros(MAX_DRAFT_TOKENS)  # a copy draws nothing
PLANNING = 1e-4  # seconds that planning a round takes, of which a SHARE is spent at most
ATTENTIVE, LONGEST_REST = 2, 15  # planned rounds before a rest, and unplanned ones in it


def plan_of(
    request: GenerationRequest,
    drafters: Mapping[str, Drafter],
    costs: KnownCosts,
    max_draft_tokens: int,
) -> Plan:
    """How a request's rounds are decided. ReplayError for a replay of drafters that lack here."""
    first = next(iter(drafters.values()))
    if request.replay is not None:
        return Replay(request.replay, drafters)
    if request.fixed_k is not None:
        return Fixed(first, request.fixed_k)
    planner = Planner(costs.table, request.temperature == 0, max_draft_tokens)
    return Auto(planner, drafters)


class Fixed:
    """One drafter and one K."""

    def __init__(self, drafter: Drafter, num_draft_tokens: int) -> None:
        self.drafter = drafter
        self.max_draft_tokens = num_draft_tokens
        name = drafter.name if num_draft_tokens else PLAIN
        self._step = RoundPlan(name, drafter, num_draft_tokens)

    def next(self, history: History, left: int) -> RoundPlan:
        return self._step

    def record(self, round_: Round) -> None:
        """Nothing is learnt."""

    def truncate(self, length: int) -> None:
        self.drafter.truncate(length)


class Auto:
    """What a planner chooses among a draft model and copies of the text itself.

    What would have been copied is known in every planned round, which costs no pass. Where nothing
    pays, and rounds are so short that planning shows, more and more of them are not planned.
    `changes` are the choices that differ from those before them, with the round's number.
    """

    def __init__(self, planner: Planner, drafters: Mapping[str, Drafter]) -> None:
        self.planner = planner
        self.max_draft_tokens = planner.max_draft_tokens
        self.changes: list[tuple[int, Choice]] = []
        self._drafters = drafters
        self._model = _model(drafters)
        self._copier = next((name for name in COPYING if name in drafters), COPYING[0])
        self._choice: Choice | None = None
        self._step: RoundPlan | None = None
        self._copy: list[int] = []
        self._rates: Sequence[float] = ()  # that its drafter promises
        self._quiet = 0  # planned rounds in a row in which nothing paid,
        self._rest = 0  # and plain rounds to come that are not planned
        self._length = 0  # of the text before the round
        self._read = 0  # of the text, by the model when it drafted the last token that was tested

    def next(self, history: History, left: int) -> RoundPlan:
        self._length = history.length
        if self._rest and self._step is not None:
            self._rest, self._copy = self._rest - 1, []
            return self._step
        choice = self.planner.choose(self._offers(history), history.length - 1)
        self._quiet = self._quiet + 1 if choice.kind == Kind.PLAIN else 0
        longest = int(PLANNING / (SHARE * choice.plain_seconds))
        self._rest = max(0, min(self._quiet - ATTENTIVE, longest, LONGEST_REST))
        self._note(choice)
        name = next(iter(self._drafters)) if choice.drafter == PLAIN else choice.drafter
        self._step = RoundPlan(choice.drafter, self._drafters[name], choice.num_draft_tokens)
        return self._step

    def record(self, round_: Round) -> None:
        assert self._choice is not None
        names: Sequence[str] = round_.sources
        if round_.drafter not in PLANNED:
            names = [round_.drafter] * round_.num_drafted
        num_accepted = round_.num_accepted
        self.planner.record(self._choice, names, num_accepted)
        for i in range(min(num_accepted, len(names) - 1), -1, -1):
            if names[i] == MODEL:
                self._read = self._length + i
                break
        if self._copy:
            num_accepted = max(num_accepted, self._judge_copy(round_.tokens, names))
        if num_accepted:
            self._quiet = 0

    def _judge_copy(self, tokens: Sequence[int], names: Sequence[str]) -> int:
        """Compare a copy with the text, drafted or not; return how many tokens agree."""
        num_agreeing, num_tested = agreeing(self._copy, tokens)
        known = self.planner.known(self._copier)
        if self._rates:
            known.trust(self._rates[:num_tested], num_agreeing)
        if self._copier not in names:
            for i in range(num_tested):
                known.record(i, i < num_agreeing)
        return num_agreeing

    def truncate(self, length: int) -> None:
        if length and self._choice is not None and self._choice.kind == Kind.PLAIN:
            return  # nobody has read a draft
        self._read = min(self._read, length)
        for drafter in self._drafters.values():
            drafter.truncate(length)

    def _offers(self, history: History) -> list[Offer]:
        """Return what each has.

        A chain that stops early is its copy. Without one it is the model, but for copies that its
        tokens may lead to: if these are accepted as often, the model alone is no better.
        """
        most, copier = self.planner.max_draft_tokens, self._copier
        behind = room = ready = num_before_model = 0
        if self._model is not None:
            behind, room = self._model.behind_and_room(history.length, self._read)
            if not history.num_new_tokens and self._is_long(behind, history.length):
                room = 0
        if (copies := self._drafters.get(copier)) is None:
            pass
        elif isinstance(copies, Suffix):
            guess = copies.guess(history, most)
            ready, num_before_model = guess.num_alone, guess.num_before_model
            self._copy, self._rates = guess.tokens[:ready], guess.rates
        else:
            self._copy = copies.propose(history, most, _CERTAIN, _NO_CHANCE).tokens
            ready = num_before_model = len(self._copy)
        offers: list[Offer] = []
        for name in self._drafters:
            if name == MODEL:
                offers.append(Offer(MODEL, room=room, behind=behind))
            elif name == copier:
                offers.append(Offer(copier, copier, ready, rates=self._rates))
            elif name == CHAIN:
                rest = max(0, room - num_before_model)
                offers.append(Offer(CHAIN, copier, num_before_model, rest, behind, self._rates))
            else:  # its cost is not known; a drafter without a model is nearly free
                offers.append(Offer(name, name, most))
        if not num_before_model and MODEL in self._drafters and CHAIN in self._drafters:
            copied, drafted = (self.planner.known(name).rate for name in (copier, MODEL))
            worse = MODEL if copied >= drafted else CHAIN
            offers = [offer for offer in offers if offer.drafter != worse]
        return offers

    def _is_long(self, behind: int, length: int) -> bool:
        """Whether a model would read for longer than a pass of the target takes: then the first
        token, which the target's own reading gives, does not wait for it.
        """
        costs = self.planner.costs(length - 1)
        return costs.catching_up(behind) > costs.plain

    def _note(self, choice: Choice) -> None:
        last, self._choice = self._choice, choice
        if last is None or (last.drafter, last.num_draft_tokens, last.kind) != (
            choice.drafter,
            choice.num_draft_tokens,
            choice.kind,
        ):
            self.changes.append((self.planner.kinds.total() + 1, choice))


class Replay:
    """The rounds of an earlier run."""

    def __init__(self, rounds: Sequence[Sequence[Any]], drafters: Mapping[str, Drafter]) -> None:
        # A caller's own drafter is recorded by its name where K is fixed.
        drafters = {drafter.name: drafter for drafter in drafters.values()} | {**drafters}
        for name, _, _ in rounds:
            if name != PLAIN and name not in drafters:
                raise ReplayError(
                    f"the replay has rounds of '{name}', here are {', '.join(drafters)}; "
                    "replay with the bundle and options of the run"
                )
        self.max_draft_tokens = max(k for _, k, _ in rounds)
        self._drafters = drafters
        self._rounds = [(name, k) for name, k, times in rounds for _ in range(times)]
        self._done = 0

    def next(self, history: History, left: int) -> RoundPlan:
        if self._done == len(self._rounds):
            raise ReplayError(
                f"the replay ends after {self._done} rounds, {left} tokens early; "
                "replay with the prompt, seed and options of the run"
            )
        name, k = self._rounds[self._done]
        self._done += 1
        drafter = self._drafters.get(name) or next(iter(self._drafters.values()))
        return RoundPlan(name, drafter, k)

    def record(self, round_: Round) -> None:
        """Nothing is learnt."""

    def truncate(self, length: int) -> None:
        for drafter in self._drafters.values():
            drafter.truncate(length)


def _model(drafters: Mapping[str, Drafter]) -> DraftModel | None:
    """The draft model, alone or at a chain's end."""
    found = drafters.get(MODEL)
    if found is None and isinstance(chain := drafters.get(CHAIN), Chain):
        found = chain.drafters[-1]
    return found if isinstance(found, DraftModel) else None


def recorded(rounds: Sequence[Round]) -> list[PlannedRounds]:
    """Drafter and K of every round, equal ones in a row together: what a replay takes."""
    found: list[PlannedRounds] = []
    for round_ in rounds:
        name, k = round_.drafter, round_.num_draft_tokens
        if found and found[-1][:2] == (name, k):
            found[-1] = (name, k, found[-1][2] + 1)
        else:
            found.append((name, k, 1))
    return found
