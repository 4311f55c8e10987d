"""Planner: the drafter and K of a round with the most expected tokens for the expected time.

Arithmetic on costs and counts alone, without a clock or randomness: the same cost table and the
same earlier rounds give the same choice, so that a seed repeats its text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from specedge.option_specs import NameEnum
from specedge.request import PLAIN, DrafterName

from .cost_table import COSTS_INTERVAL, CostTable, RoundCosts

MODEL, CHAIN, SUFFIX = DrafterName.MODEL, DrafterName.CHAIN, DrafterName.SUFFIX

MIN_GAIN = 1.03  # a lower ratio is within the grid that costs are rounded to
HORIZON = 32  # tokens that a text is expected to go on for, or as many as it has
BUDGET_ROUNDS, BUDGET_SHARE = 1.5, 0.005  # exploration budget: plain rounds, and share of the time
MIN_CHANCE = 0.01  # of a draft token's acceptance, below which no longer draft is considered

PRIOR_RATE = 0.5  # acceptance rate of an unknown drafter, low for one that pays
PRIOR_TESTS = 4.0  # tests that a prior rate counts as
POSITION_TESTS = 2.0  # tests that the rate of the position before counts as
DECAY = 0.94  # weight that a test leaves to those before it: half after 11


class RoundKind(NameEnum):
    """Reason of a choice."""

    PLAIN = "plain"
    GAIN = "gain"
    PROBE = "probe"


@dataclass(frozen=True)
class Offer:
    """Draft that a drafter could propose in the next round.

    First `ready` tokens that need no pass, of the drafter `source`, with `rates` if it predicts
    their acceptance rates; then, if a model continues, up to `room` tokens at a pass each, after a
    catch-up over the `behind` tokens that it has not read.
    """

    drafter: str
    source: str = MODEL
    ready: int = 0
    room: int = 0
    behind: int = 1
    rates: Sequence[float] = ()


@dataclass(frozen=True)
class RoundChoice:
    """Drafter and K of one round, and what is expected of it.

    `seconds` are the round's by the cost table, `plain_seconds` those of plain decoding for one
    token, both without the host's work for each token. `reading` is the part of `seconds` for the
    catch-up of a model; `pace` is seconds a token, with a share of the catch-up.
    """

    drafter: str
    num_draft_tokens: int
    kind: RoundKind
    expected_tokens: float
    seconds: float
    plain_seconds: float
    reading: float = 0.0
    pace: float = 0.0


class AcceptanceEstimate:
    """Acceptance rates by position in a draft, as exponential averages with a prior.

    The first position starts from the `expected` rate, a later one from the position before it.
    """

    def __init__(self, expected: float = PRIOR_RATE) -> None:
        self.expected = expected
        self._accepted, self._tested = [PRIOR_TESTS * expected], [PRIOR_TESTS]
        self._rates: list[float] = []
        self._fulfilled, self._predicted = PRIOR_TESTS * PRIOR_RATE, PRIOR_TESTS

    def record(self, position: int, is_accepted: bool) -> None:
        """Count the test of a token whose predecessors in the draft were accepted."""
        while position >= len(self._tested):
            self._accepted.append(0.0)
            self._tested.append(0.0)
        self._accepted[position] = DECAY * self._accepted[position] + is_accepted
        self._tested[position] = DECAY * self._tested[position] + 1
        self._rates.clear()

    def record_predictions(self, predicted: Sequence[float], num_accepted: int) -> None:
        """Count tests of tokens whose rates a drafter predicted, the first of them accepted."""
        self._predicted = DECAY * self._predicted + sum(predicted)
        self._fulfilled = DECAY * self._fulfilled + num_accepted

    def calibrate(self, predicted: Sequence[float]) -> list[float]:
        """Return predicted rates times the share of earlier predictions that came true."""
        factor = min(1.0, self._fulfilled / self._predicted)
        return [factor * rate for rate in predicted]

    @property
    def rate(self) -> float:
        """Acceptance rate of the first position."""
        return self.rates(1)[0]

    def rates(self, count: int) -> list[float]:
        """Return the rate of each position, given that those before are accepted. -> [count]"""
        rates = self._rates
        if not rates:
            rates.append(self._accepted[0] / self._tested[0])
        for i in range(len(rates), count):
            last = rates[-1]
            if i < len(self._tested):
                last = (self._accepted[i] + POSITION_TESTS * last) / (
                    self._tested[i] + POSITION_TESTS
                )
            rates.append(last)
        return rates[:count]


class Planner:
    """Choice of drafter and K before each round of one request, learning from each round."""

    def __init__(self, table: CostTable, greedy: bool, max_draft_tokens: int | None = None) -> None:
        limit = table.max_draft_tokens
        self.table = table
        self.greedy = greedy
        self.max_draft_tokens = limit if max_draft_tokens is None else min(max_draft_tokens, limit)
        self.acceptance: dict[str, AcceptanceEstimate] = {}
        self.kinds: Counter[RoundKind] = Counter()
        self.num_tokens = 0
        self.seconds = 0.0  # of all rounds so far, by the table
        self.plain_seconds = 0.0  # of their tokens in plain decoding
        self.lost = 0.0  # by probes
        self.last_costs: RoundCosts | None = None
        self._longest_reading = 0.0  # seconds of a draft model's longest catch-up
        self._costs: dict[int, RoundCosts] = {}

    def costs(self, length: int) -> RoundCosts:
        """Return the costs with about `length` tokens in the cache."""
        interval = length // COSTS_INTERVAL
        if interval not in self._costs:
            middle = interval * COSTS_INTERVAL + COSTS_INTERVAL // 2
            self._costs[interval] = self.table.at(middle, self.greedy)
        return self._costs[interval]

    def estimate(self, source: str) -> AcceptanceEstimate:
        """Return the acceptance estimate of a drafter."""
        if source not in self.acceptance:
            expected = self.table.mode(self.greedy).acceptance.get(source, PRIOR_RATE)
            self.acceptance[source] = AcceptanceEstimate(expected)
        return self.acceptance[source]

    def choose(self, offers: Sequence[Offer], length: int) -> RoundChoice:
        """Return the best of the offers, or K = 0, with `length` tokens in the target's cache.

        The number of tokens that are left makes no difference, so that a seed's text does not
        depend on where a request ends.
        """
        costs = self.last_costs = self.costs(length)
        best: RoundChoice | None = None
        for offer in offers:
            choice = self._best(offer, costs)
            if choice is not None and (best is None or choice.pace < best.pace):
                best = choice
        if best is not None and (best.pace + costs.token) * MIN_GAIN < costs.plain + costs.token:
            return best
        probes = (probe for offer in offers if (probe := self._probe(offer, costs)))
        plain = RoundChoice(PLAIN, 0, RoundKind.PLAIN, 1.0, costs.plain, costs.plain)
        return next(probes, None) or plain

    def record(self, choice: RoundChoice, sources: Sequence[str], num_accepted: int) -> None:
        """Learn from a round: the sources of its draft tokens, and how many were accepted.

        A round whose drafter proposed nothing, as at a request's end, was plain.
        """
        self.num_tokens += num_accepted + 1
        self.kinds[choice.kind] += 1
        if choice.kind == RoundKind.PLAIN:
            self.seconds += choice.seconds
            self.plain_seconds += choice.seconds
            return
        has_drafted = bool(sources) or choice.kind == RoundKind.PROBE
        seconds = choice.seconds if has_drafted else choice.plain_seconds
        plain_seconds = choice.plain_seconds * (num_accepted + 1)
        self.seconds += seconds
        self.plain_seconds += plain_seconds
        self._longest_reading = max(self._longest_reading, choice.reading)
        if choice.kind == RoundKind.PROBE:
            self.lost = max(0.0, self.lost + seconds - plain_seconds)
        # Only tested tokens count: how many were drafted depends on the request's end.
        positions: Counter[str] = Counter()
        for i, source in enumerate(sources[: num_accepted + 1]):
            self.estimate(source).record(positions[source], i < num_accepted)
            positions[source] += 1

    @property
    def gained(self) -> float:
        """Seconds saved over plain decoding so far, by the table; negative for a loss."""
        return self.plain_seconds - self.seconds

    @property
    def expected_speedup(self) -> float | None:
        """Speed-up of the rounds so far over plain decoding, by the table."""
        if self.last_costs is None or not self.seconds:
            return None
        host = self.num_tokens * self.last_costs.token
        return (self.plain_seconds + host) / (self.seconds + host)

    def _best(
        self, offer: Offer, costs: RoundCosts, is_certain: bool = False
    ) -> RoundChoice | None:
        """Return an offer's best K above 0, None if there is none.

        Tokens with acceptance rates a, b, ... give 1 + a + ab + ... expected tokens. A model's
        catch-up is spread over the tokens that may still come; reading the copy that it continues
        is the round's own cost. A round that would lose more than the exploration budget and the
        time gained so far, if nothing were accepted, is not offered. `is_certain` sets all rates
        to 1.
        """
        ready = offer.ready
        limit = min(self.max_draft_tokens, ready + offer.room)
        if limit < 1:
            return None
        if is_certain:
            rates: Sequence[float] = [1.0] * limit
        else:
            rates = self._ready_rates(offer)
            if limit > ready:
                rates = [*rates, *self.estimate(MODEL).rates(limit - ready)]
        reading = more = share = 0.0
        if offer.room:
            reading, behind = costs.catch_up(offer.behind), offer.behind + ready
            more = costs.catch_up(behind) - reading
            share = reading / max(HORIZON, self.num_tokens)
        rounds, passes = costs.rounds, costs.passes
        max_seconds = inf
        if not is_certain:
            max_seconds = costs.plain + self._budget(costs) + self.gained + self._longest_reading
        chance = expected = 1.0
        best = (inf, 0, 1.0, 0.0)
        for k in range(1, limit + 1):
            chance *= rates[k - 1]
            if chance < MIN_CHANCE:
                break
            expected += chance
            seconds = rounds[k] if k <= ready else rounds[k] + passes[k - ready] + more
            pace = seconds / expected if k <= ready else seconds / expected + share
            if pace < best[0] and seconds <= max_seconds:
                best = pace, k, expected, seconds
        pace, k, expected, seconds = best
        if not k:
            return None
        read = reading if k > ready else 0.0
        return RoundChoice(
            offer.drafter, k, RoundKind.GAIN, expected, seconds + read, costs.plain, read, pace
        )

    def _budget(self, costs: RoundCosts) -> float:
        """Return the exploration budget in seconds."""
        return BUDGET_ROUNDS * costs.plain + BUDGET_SHARE * self.seconds

    def _ready_rates(self, offer: Offer) -> list[float]:
        estimate = self.estimate(offer.source)
        if offer.rates:
            return estimate.calibrate(offer.rates[: offer.ready])
        return estimate.rates(offer.ready)

    def _probe(self, offer: Offer, costs: RoundCosts) -> RoundChoice | None:
        """Return a round of one draft token, to learn; None if it costs too much or cannot pay.

        Suffix decoding needs none: its guesses are compared with the text in every round.
        """
        source = offer.source if offer.ready else MODEL  # whose acceptance the token tests
        if source == SUFFIX or not offer.ready + offer.room or not self.max_draft_tokens:
            return None
        reading, seconds = 0.0, costs.rounds[1]
        if not offer.ready:
            reading = costs.catch_up(offer.behind)
            seconds += costs.passes[1] + reading
        spent = max(self.lost, -self.gained - self._longest_reading)
        if seconds - costs.plain > self._budget(costs) - spent:
            return None
        hoped = self._best(offer, costs, is_certain=True)
        if hoped is None or hoped.pace * MIN_GAIN >= costs.plain:
            return None
        expected = 1 + self.estimate(source).rate
        return RoundChoice(
            offer.drafter, 1, RoundKind.PROBE, expected, seconds, costs.plain, reading
        )


def predictions(costs: RoundCosts, alpha: float) -> list[float]:
    """Return the speed-up of a draft model at K = 0, 1, ... with acceptance rate alpha."""
    speedups, expected = [1.0], 1.0
    for k in range(1, len(costs.rounds)):
        expected += alpha**k
        seconds = costs.passes[k] + costs.rounds[k] + costs.token * expected
        speedups.append(expected * (costs.plain + costs.token) / seconds)
    return speedups
