"""Choice of the drafter and K of a round: the most expected tokens for the expected time.

Arithmetic on costs and counts alone, without a clock or randomness: the same table and the same
rounds before give the same choice, so a seed repeats its text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from .acceptance import PRIOR, Acceptance
from .choices import COPYING, MODEL, PLAIN, Choice, Kind, Offer
from .cost_table import PLACES, Costs, CostTable

MARGIN = 1.03  # a gain below this is within the grid that costs are rounded to
HORIZON = 32  # a text is expected to go on for as long as it has, and so many tokens at least
STAKE, SHARE = 1.5, 0.005  # plain rounds that a request may lose, and the share of its time
UNLIKELY = 0.01  # chance of a draft token from which on no more is considered


class Planner:
    """Chooses before each round of one request, and learns from it."""

    def __init__(self, table: CostTable, greedy: bool, max_draft_tokens: int | None = None) -> None:
        most = table.max_draft_tokens
        self.table = table
        self.greedy = greedy
        self.max_draft_tokens = most if max_draft_tokens is None else min(max_draft_tokens, most)
        self.acceptance: dict[str, Acceptance] = {}
        self.kinds: Counter[Kind] = Counter()
        self.num_tokens = 0
        self.seconds = 0.0  # of all rounds so far, by the table
        self.plain_seconds = 0.0  # of their tokens in plain decoding
        self.lost = 0.0  # by probes
        self._reading = 0.0  # the most that a draft model read at once
        self.last_costs: Costs | None = None
        self._costs: dict[int, Costs] = {}

    def costs(self, length: int) -> Costs:
        """Return the costs with about `length` tokens in the cache."""
        place = length // PLACES
        if place not in self._costs:
            self._costs[place] = self.table.at(place * PLACES + PLACES // 2, self.greedy)
        return self._costs[place]

    def known(self, source: str) -> Acceptance:
        if source not in self.acceptance:
            expected = self.table.mode(self.greedy).acceptance.get(source, PRIOR)
            self.acceptance[source] = Acceptance(expected)
        return self.acceptance[source]

    def choose(self, offers: Sequence[Offer], length: int) -> Choice:
        """Return the best of the offers, or K = 0, with `length` tokens in the target's cache.

        How many are still wanted makes no difference: so a seed's text does not depend on where a
        request ends.
        """
        costs = self.last_costs = self.costs(length)
        best: Choice | None = None
        for offer in offers:
            choice = self._best(offer, costs)
            if choice is not None and (best is None or choice.pace < best.pace):
                best = choice
        if best is not None and (best.pace + costs.token) * MARGIN < costs.plain + costs.token:
            return best
        probes = (probe for offer in offers if (probe := self._probe(offer, costs)))
        return next(probes, None) or Choice(PLAIN, 0, Kind.PLAIN, 1.0, costs.plain, costs.plain)

    def record(self, choice: Choice, sources: Sequence[str], num_accepted: int) -> None:
        """Learn from a round: where its draft tokens came from, and how many were accepted.

        Where a draft was chosen and none was made, as at a request's end, the round was plain.
        """
        self.num_tokens += num_accepted + 1
        self.kinds[choice.kind] += 1
        if choice.kind == Kind.PLAIN:
            self.seconds += choice.seconds
            self.plain_seconds += choice.seconds
            return
        drafted = bool(sources) or choice.kind == Kind.PROBE
        seconds = choice.seconds if drafted else choice.plain_seconds
        plain_seconds = choice.plain_seconds * (num_accepted + 1)
        self.seconds += seconds
        self.plain_seconds += plain_seconds
        self._reading = max(self._reading, choice.reading)
        if choice.kind == Kind.PROBE:
            self.lost = max(0.0, self.lost + seconds - plain_seconds)
        # No more than was tested counts: how much was drafted depends on the request's end.
        positions: Counter[str] = Counter()
        for i, source in enumerate(sources[: num_accepted + 1]):
            self.known(source).record(positions[source], i < num_accepted)
            positions[source] += 1

    @property
    def gained(self) -> float:
        """Seconds that plain decoding would have taken longer, by the table; a loss below 0."""
        return self.plain_seconds - self.seconds

    @property
    def expected_speedup(self) -> float | None:
        """Speed-up of the rounds so far over plain decoding, by the table."""
        if self.last_costs is None or not self.seconds:
            return None
        each = self.num_tokens * self.last_costs.token
        return (self.plain_seconds + each) / (self.seconds + each)

    def _best(self, offer: Offer, costs: Costs, certain: bool = False) -> Choice | None:
        """Return an offer's best K above 0, None if it has none.

        Tokens with acceptance rates a, b, ... give 1 + a + ab + ... of them. What the model must
        read first is spread over the tokens that may still come; the copy that it goes on from is
        the round's own cost. A round that would lose more than the budget and what was gained, if
        nothing were accepted, is not offered. `certain` takes all rates for 1.
        """
        ready = offer.ready
        most = min(self.max_draft_tokens, ready + offer.room)
        if most < 1:
            return None
        if certain:
            rates: Sequence[float] = [1.0] * most
        else:
            rates = self._ready_rates(offer)
            if most > ready:
                rates = [*rates, *self.known(MODEL).rates(most - ready)]
        reading = more = share = 0.0
        if offer.room:
            reading, behind = costs.catching_up(offer.behind), offer.behind + ready
            more = costs.catching_up(behind) - reading
            share = reading / max(HORIZON, self.num_tokens)
        rounds, passes = costs.rounds, costs.passes
        budget = STAKE * costs.plain + SHARE * self.seconds
        dearest = costs.plain + budget + self.gained + self._reading if not certain else inf
        chance = expected = 1.0
        best = (inf, 0, 1.0, 0.0)
        for k in range(1, most + 1):
            chance *= rates[k - 1]
            if chance < UNLIKELY:
                break
            expected += chance
            seconds = rounds[k] if k <= ready else rounds[k] + passes[k - ready] + more
            pace = seconds / expected if k <= ready else seconds / expected + share
            if pace < best[0] and seconds <= dearest:
                best = pace, k, expected, seconds
        pace, k, expected, seconds = best
        if not k:
            return None
        read = reading if k > ready else 0.0
        return Choice(
            offer.drafter, k, Kind.GAIN, expected, seconds + read, costs.plain, read, pace
        )

    def _ready_rates(self, offer: Offer) -> list[float]:
        known = self.known(offer.source)
        if offer.rates:
            return known.trusted(offer.rates[: offer.ready])
        return known.rates(offer.ready)

    def _probe(self, offer: Offer, costs: Costs) -> Choice | None:
        """Return a round of one draft token, to learn; None if it is too dear or without hope.

        Copies are compared with the text in every round, so they need none.
        """
        source = offer.source if offer.ready else MODEL  # whose acceptance the token tells of
        if source in COPYING or not offer.ready + offer.room or not self.max_draft_tokens:
            return None
        reading, seconds = 0.0, costs.rounds[1]
        if not offer.ready:
            reading = costs.catching_up(offer.behind)
            seconds += costs.passes[1] + reading
        budget = STAKE * costs.plain + SHARE * self.seconds
        if seconds - costs.plain > budget - max(self.lost, -self.gained - self._reading):
            return None
        hoped = self._best(offer, costs, certain=True)
        if hoped is None or hoped.pace * MARGIN >= costs.plain:
            return None
        expected = 1 + self.known(source).rate
        return Choice(offer.drafter, 1, Kind.PROBE, expected, seconds, costs.plain, reading)


def predictions(costs: Costs, alpha: float) -> list[float]:
    """Return the speed-up of a draft model at K = 0, 1, ... if tokens are accepted with alpha."""
    speedups, expected = [1.0], 1.0
    for k in range(1, len(costs.rounds)):
        expected += alpha**k
        seconds = costs.passes[k] + costs.rounds[k] + costs.token * expected
        speedups.append(expected * (costs.plain + costs.token) / seconds)
    return speedups
