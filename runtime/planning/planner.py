"""Which drafter drafts how many tokens in the next round: what gives most tokens a second.

Arithmetic on costs and counts alone: no clock, no chance. The same table and the same rounds before
give the same choice, so a seed repeats a text to the byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from .acceptance import GUESSED_TESTS, PRIOR, TUNED_TESTS, Acceptance
from .choices import COPYING, MODEL, PLAIN, Choice, Kind, Offer
from .cost_table import PLACES, Costs, CostTable

MARGIN = 1.02  # a gain below this is within what costs were measured to
STAKE = 2.5  # plain rounds that a request may lose, and half as many more by single draft tokens
UNMEASURED = 0.7  # expected acceptance of a draft model, and of copies, before `specedge tune`
HORIZON = 32  # a text is expected to go on for as long as it has, and so many tokens at least
PROBING = 0.005  # the share of a request's seconds that probes may lose
FIRST_GAP = 8  # rounds from a drafter's last one to its probe; doubled by each probe that fails


class Planner:
    """Chooses before each round of one request, and learns from it."""

    def __init__(self, table: CostTable, greedy: bool, max_draft_tokens: int | None = None) -> None:
        most = table.max_draft_tokens
        self.table = table
        self.greedy = greedy
        self.max_draft_tokens = most if max_draft_tokens is None else min(max_draft_tokens, most)
        self.acceptance: dict[str, Acceptance] = {}
        self.kinds: Counter[Kind] = Counter()
        self.seconds = 0.0  # of all rounds so far, by the table
        self.plain_seconds = 0.0  # of their tokens from the target alone
        self.lost = 0.0  # by probes
        self.last_costs: Costs | None = None
        self._reading = 0.0  # the most that a draft model read at once
        self._num_tokens = 0
        self._gaps: defaultdict[str, int] = defaultdict(lambda: FIRST_GAP)
        self._due: Counter[str] = Counter()  # the round from which on a drafter may be probed
        self._costs: dict[int, Costs] = {}

    def costs(self, length: int) -> Costs:
        """The costs with about `length` tokens in the cache."""
        place = length // PLACES
        if place not in self._costs:
            self._costs[place] = self.table.at(place * PLACES + PLACES // 2, self.greedy)
        return self._costs[place]

    def known(self, source: str) -> Acceptance:
        if source not in self.acceptance:
            expected = self.table.mode(self.greedy).acceptance.get(source)
            if expected is None and self.table.origin == "load" and source in (MODEL, *COPYING):
                expected = UNMEASURED
            tuned = expected is not None and self.table.origin == "tune"
            tests = TUNED_TESTS if tuned else GUESSED_TESTS
            self.acceptance[source] = Acceptance(PRIOR if expected is None else expected, tests)
        return self.acceptance[source]

    def choose(self, offers: Sequence[Offer], length: int) -> Choice:
        """The best of the offers, or K = 0.

        `length` tokens are in the target's cache. How many are still wanted makes no difference: so
        a seed's text does not depend on where a request ends.
        """
        costs = self.last_costs = self.costs(length)
        plain = costs.plain
        found = [best for offer in offers if (best := self._best(offer, costs))]
        best = min(found, key=lambda choice: choice.pace, default=None)
        if best is not None and best.pace * MARGIN < plain:
            return best
        probes = (probe for offer in offers if (probe := self._probe(offer, costs)))
        return next(probes, Choice(PLAIN, 0, Kind.PLAIN, 1.0, plain, plain))

    def record(self, choice: Choice, sources: Sequence[str], num_accepted: int) -> None:
        """A round ended: where its drafted tokens came from, and how many were accepted.

        Where a draft was chosen and none was made, as at a request's end, the round was plain.
        """
        self._num_tokens += num_accepted + 1
        self.kinds[choice.kind] += 1
        drafted = bool(sources) or choice.kind == Kind.PLAIN
        seconds = choice.seconds if drafted else choice.plain_seconds
        plain_seconds = choice.plain_seconds * (num_accepted + 1)
        self.seconds += seconds
        self.plain_seconds += plain_seconds
        self._reading = max(self._reading, choice.reading)
        if choice.kind == Kind.PROBE:
            self.lost = max(0.0, self.lost + seconds - plain_seconds)
        if not sources and not choice.probed:
            return
        # No more than was tested counts: how much was drafted depends on the request's end.
        tested, accepted = Counter(sources[: num_accepted + 1]), Counter(sources[:num_accepted])
        for source in tested:
            self.known(source).record(accepted[source], tested[source])
        # A probe whose token a grammar forced has told nothing of the drafter.
        for source in tested or [choice.probed]:
            self._postpone(source, choice.kind == Kind.PROBE, accepted[source] > 0)

    def _postpone(self, source: str, probed: bool, accepted: bool) -> None:
        """The next probe of a drafter: at once after one that was accepted, else after a gap."""
        if accepted:
            self._gaps[source] = FIRST_GAP
        elif probed:
            self._gaps[source] *= 2
        self._due[source] = self.kinds.total() + (0 if probed and accepted else self._gaps[source])

    @property
    def gained(self) -> float:
        """Seconds that the target alone would have taken longer, by the table; a loss below 0."""
        return self.plain_seconds - self.seconds

    @property
    def expected_speedup(self) -> float | None:
        """What the rounds so far gained over the target alone, by the table."""
        return self.plain_seconds / self.seconds if self.seconds else None

    def _best(self, offer: Offer, costs: Costs) -> Choice | None:
        """An offer's best K above 0 that the request can afford; None if it has none."""
        copied = self.known(offer.source).rate if offer.ready else 0.0
        drafted = self.known(MODEL).rate if offer.room else 0.0
        stake = STAKE * costs.plain
        spare = stake + self.gained + self._reading
        rounds = [
            (pace, k, expected, seconds)
            for pace, k, expected, seconds in self._rounds(offer, costs, copied, drafted)
            if seconds - costs.plain <= (spare if k > 1 else spare + stake / 2)
        ]
        if not rounds:
            return None
        pace, k, expected, seconds = min(rounds)
        reading = costs.catching_up(offer.behind) if k > offer.ready else 0.0
        return Choice(
            offer.drafter, k, Kind.GAIN, expected, seconds + reading, costs.plain, reading, pace
        )

    def _rounds(
        self, offer: Offer, costs: Costs, copied: float, drafted: float
    ) -> list[tuple[float, int, float, float]]:
        """Of each K above 0 its seconds a token, K, the tokens expected, and the round's seconds.

        K tokens of rate a give 1 + a + a^2 + ... of them. What the model must read first is spread
        over the tokens that may still come; the copy that it goes on from is the round's own cost.
        """
        ready, behind = offer.ready, offer.behind + offer.ready
        reading = costs.catching_up(offer.behind)
        more = costs.catching_up(behind) - reading + (behind == 2) * costs.pending
        share = reading / max(HORIZON, self._num_tokens)
        found, chance, expected = [], 1.0, 1.0
        for k in range(1, min(self.max_draft_tokens, ready + offer.room) + 1):
            is_copy, seconds = k <= ready, costs.rounds[k]
            chance *= copied if is_copy else drafted
            expected += chance
            if not is_copy:
                seconds += costs.passes[k - ready] + more
            pace = seconds / expected + (0.0 if is_copy else share)
            found.append((pace, k, expected, seconds))
        return found

    def _probe(self, offer: Offer, costs: Costs) -> Choice | None:
        """One draft token, to learn; None if it is not yet time, too dear or without hope.

        Copies are compared with the text in every round, so they need none.
        """
        source = offer.source if offer.ready else MODEL  # whose acceptance the token tells of
        if source in COPYING or self.kinds.total() < self._due[source]:
            return None
        reading = costs.catching_up(offer.behind) if not offer.ready else 0.0
        first = costs.passes[1] + (offer.behind == 2) * costs.pending
        seconds = costs.rounds[1] + (0.0 if offer.ready else first) + reading
        if self.lost + seconds - costs.plain > PROBING * self.seconds:
            return None
        sure = self._rounds(offer, costs, 1.0, 1.0)
        if not sure or min(sure)[0] * MARGIN >= costs.plain:
            return None
        expected = 1 + self.known(source).rate
        return Choice(
            offer.drafter, 1, Kind.PROBE, expected, seconds, costs.plain, reading, probed=source
        )


def predictions(costs: Costs, alpha: float) -> list[float]:
    """The speed-up of a draft model at K = 0, 1, ... if tokens are accepted with alpha."""
    found, expected = [1.0], 1.0
    for k in range(1, len(costs.rounds)):
        expected += alpha**k
        found.append(expected * costs.plain / (costs.passes[k] + costs.rounds[k]))
    return found
