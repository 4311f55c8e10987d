"""Which drafter drafts how many tokens in the next round: what gives most tokens a second.

Arithmetic on costs and counts alone: no clock, no chance. The same table and the same rounds before
give the same choice, so a seed repeats a text to the byte.

A round of K draft tokens yields E = 1 + sum over i of the chance that the first i are accepted, and
costs its draft passes, a verify pass over K + 1 rows and the host. K = 0 is the target alone. What
a draft model must read before it can draft is spread over the tokens that may still come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .acceptance import MEMORY, Acceptance
from .choices import MODEL, PLAIN, Choice, Offer
from .cost_table import PLACES, Costs, CostTable

MARGIN = 1.02  # a gain below this is within what costs were measured to
DOUBT = 0.05  # so much more a draft pass may cost beside the target's
STAKES = {"tune": 4.0, "use": 1.5, "bytes": 1.5}  # plain rounds that a request may lose, by what
LEAST_STAKE = 0.5  # the table is from; with a drafter that it expects nothing of, so many,
LOSING = 0.005  # and this share of the seconds so far
HORIZON = 32  # a text is expected to go on for as long as it has, and so many tokens at least
PROBING = 0.005  # the share of a request's seconds that probes may lose,
REINVESTED = 0.1  # and the share of what it has gained
FIRST_GAP, LAST_GAP = 8, 256  # rounds from one probe to the next; doubled by each that fails
PASSES_WEIGHT = 4.0  # tokens of a chain that are expected to cost a pass, before it shows


class Planner:
    """Chooses before each round of one request, and learns from it."""

    def __init__(self, table: CostTable, greedy: bool, max_draft_tokens: int | None = None) -> None:
        most = table.max_draft_tokens
        self.table = table
        self.greedy = greedy
        self.max_draft_tokens = most if max_draft_tokens is None else min(max_draft_tokens, most)
        self.priors: Mapping[str, float] = table.mode(greedy).acceptance
        self._tuned = table.origin == "tune"
        self.acceptance: dict[str, Acceptance] = {}
        self.kinds: Counter[str] = Counter()
        self.seconds = 0.0  # of all rounds so far, by the table
        self.plain_seconds = 0.0  # of their tokens from the target alone
        self.lost = 0.0  # by probes
        self._reading = 0.0  # the most that a draft model read at once
        self.last_costs: Costs | None = None
        self._num_tokens = 0
        self._rounds = 0
        self._probes: defaultdict[str, _Probes] = defaultdict(_Probes)
        self._bridging = (0.0, 0.0)  # passes, and tokens, behind the first of a chain's model
        self._costs: dict[int, Costs] = {}

    def costs(self, length: int) -> Costs:
        """The costs with about `length` tokens in the cache."""
        place = length // PLACES
        if place not in self._costs:
            self._costs[place] = self.table.at(place * PLACES + PLACES // 2, self.greedy)
        return self._costs[place]

    def chances(self, source: str) -> Acceptance:
        """What is known of a drafter's tokens."""
        if source not in self.acceptance:
            prior = self.priors.get(source)
            self.acceptance[source] = Acceptance(prior, prior is not None and self._tuned)
        return self.acceptance[source]

    def choose(self, offers: Sequence[Offer], length: int) -> Choice:
        """The best of the offers, or K = 0.

        `length` tokens are in the target's cache. How many are still wanted makes no difference: so
        a seed's text does not depend on where a request ends.
        """
        costs = self.last_costs = self.costs(length)
        best, pace, learns = Choice(PLAIN, 0, PLAIN, 1.0, costs.plain, costs.plain), costs.plain, ""
        for offer in offers:
            found, seconds = self._best(offer, costs)
            if found is not None and seconds < pace:
                best, pace, learns = found, seconds, offer.learns(found.num_draft_tokens)
        for offer in offers:
            if not offer.watched and offer.learns(1) != learns:
                probe = self._probe(offer, costs, pace)
                if probe is not None:
                    return probe
        return best

    def record(self, choice: Choice, sources: Sequence[str], num_accepted: int) -> None:
        """A round ended: where its drafted tokens came from, and how many were accepted.

        Where a draft was chosen and none was made, as at a request's end, the round was plain.
        """
        seconds = choice.seconds if sources or choice.kind == PLAIN else choice.plain_seconds
        self._rounds += 1
        self._num_tokens += num_accepted + 1
        self.kinds[choice.kind] += 1
        self.seconds += seconds
        self._reading = max(self._reading, choice.reading)
        self.plain_seconds += choice.plain_seconds * (num_accepted + 1)
        if choice.kind == PLAIN:
            return
        # No more than was tested counts: how much was drafted depends on the request's end.
        tested = sources[: num_accepted + 1]
        for source, found in _runs(tested, num_accepted).items():
            self.chances(source).record(*found)
            if choice.kind != "probe":
                self._probes[source].used(self._rounds, found[0][0] > 0)
        if choice.kind == "probe":
            self.lost = max(0.0, self.lost + seconds - choice.pace * (num_accepted + 1))
            at_once = num_accepted > 0 and choice.pace == choice.plain_seconds
            self._probes[choice.learns].end(self._rounds, num_accepted > 0, at_once)
        if MODEL in tested and choice.drafter != MODEL:
            later = tested[tested.index(MODEL) + 1 :]
            passes, tokens = self._bridging
            self._bridging = passes * MEMORY + later.count(MODEL), tokens * MEMORY + len(later)

    @property
    def gained(self) -> float:
        """Seconds that the target alone would have taken longer, by the table; a loss below 0."""
        return self.plain_seconds - self.seconds

    @property
    def expected_speedup(self) -> float | None:
        """What the rounds so far gained over the target alone, by the table."""
        return self.plain_seconds / self.seconds if self.seconds else None

    def affords_two(self, choice: Choice) -> bool:
        """Whether two rounds of a draft model's choice may both fail."""
        loss = choice.seconds - choice.plain_seconds
        return 2 * loss <= self._spare(MODEL, choice.plain_seconds)

    def _spare(self, source: str, plain: float) -> float:
        """The seconds that a round of a drafter may lose, but for what its model must read."""
        stake = LEAST_STAKE * plain
        if source in self.priors:
            stake = STAKES[self.table.origin] * plain + LOSING * self.seconds
        return stake + self.gained + self._reading

    def _best(self, offer: Offer, costs: Costs) -> tuple[Choice | None, float]:
        """An offer's best K, and its seconds a token with the share of what its model must read."""
        spare = self._spare(offer.learns(1), costs.plain)
        bold = spare > 0
        most = min(self.max_draft_tokens if bold else 1, offer.ready + offer.room)
        if most < 1:
            return None, costs.plain
        ready = self.chances(offer.source).chances(offer.ready, bold) if offer.ready else []
        model = self.chances(offer.model).chances(most, bold) if offer.room else []
        behind, later, more = offer.behind + offer.ready, 0.0, 0.0
        if offer.room:
            later = costs.catching_up(offer.behind)
            more = costs.catching_up(behind) - later + (behind == 2) * costs.pending
        share = later / max(HORIZON, self._num_tokens)
        rounds, passes, drafted = costs.rounds, costs.passes, offer.ready
        first, each = passes[1], self._passes_per_token if offer.source else 1.0
        stands = expected = 1.0
        best, best_expected, best_pace, best_seconds = 0, 1.0, costs.plain, costs.plain
        reading = drafting = 0.0
        for k in range(1, most + 1):
            if k <= drafted:
                stands *= ready[k - 1]
                expected += stands
                seconds = rounds[k]
                pace = seconds / expected
            else:
                stands *= model[k - 1 - drafted]
                expected += stands
                seconds = more + first + (passes[k - drafted] - first) * each + rounds[k]
                pace = seconds / expected + share
            if bold and k > 1 and seconds - costs.plain > spare:
                break
            if pace < best_pace:
                best, best_expected, best_pace = k, expected, pace
                reading = later if k > offer.ready else 0.0
                drafting = seconds - rounds[k]
                best_seconds = seconds + reading
            if seconds >= (expected + stands * (most - k)) * best_pace:
                break  # not even if every token more accepted, for nothing
        dearest = best_pace + DOUBT * drafting / best_expected
        if not best or dearest * MARGIN >= costs.plain:
            return None, costs.plain
        found = Choice(
            offer.drafter, best, "gain", best_expected, best_seconds, costs.plain, reading
        )
        return found, best_pace

    @property
    def _passes_per_token(self) -> float:
        """A chain may copy again after its model's first token: so many passes each later takes."""
        passes, tokens = self._bridging
        return (passes + PASSES_WEIGHT) / (tokens + PASSES_WEIGHT)

    def _probe(self, offer: Offer, costs: Costs, pace: float) -> Choice | None:
        """One draft token, to learn; None if it is not yet time, too dear or without hope."""
        source = offer.learns(1)
        if self._rounds < self._probes[source].next or not offer.ready + offer.room:
            return None
        seconds, reading = costs.rounds[1], 0.0
        if not offer.ready:
            reading = costs.catching_up(offer.behind)
            seconds += reading + costs.drafting(offer.behind)[1]
        allowed = PROBING * self.seconds + REINVESTED * max(0.0, self.gained)
        if self.lost + seconds - pace > allowed:
            return None
        if not self._hopes(offer, costs, pace):
            return None
        chance = self.chances(source).chances(1)[0]
        return Choice(
            offer.drafter, 1, "probe", 1 + chance, seconds, costs.plain, reading, source, pace
        )

    def _hopes(self, offer: Offer, costs: Costs, pace: float) -> bool:
        """Whether a drafter that is always right would be worth having."""
        most = min(self.max_draft_tokens, offer.ready + offer.room)
        passes = costs.drafting()
        paces = (
            (passes[max(0, k - offer.ready)] + costs.rounds[k]) / (k + 1)
            for k in range(1, most + 1)
        )
        return min(paces) * MARGIN < pace


def _runs(tested: Sequence[str], num_accepted: int) -> dict[str, list[tuple[int, int]]]:
    """By drafter, each run of its tokens: how many accepted, and how many were tested."""
    runs: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for end in range(1, len(tested) + 1):
        if end == len(tested) or tested[end] != tested[start]:
            run = min(num_accepted, end) - start, end - start
            runs.setdefault(tested[start], []).append(run)
            start = end
    return runs


class _Probes:
    """When a drafter's next probe may be."""

    def __init__(self) -> None:
        self.next = 0
        self._gap = FIRST_GAP

    def used(self, now: int, accepted: bool) -> None:
        """A round has told of the drafter without a probe."""
        if accepted:
            self._gap = FIRST_GAP
        self.next = max(self.next, now + FIRST_GAP)

    def end(self, now: int, accepted: bool, at_once: bool) -> None:
        """A probe has; the next may follow `at_once`."""
        self._gap = FIRST_GAP if accepted else min(2 * self._gap, LAST_GAP)
        self.next = now if at_once else now + self._gap


def predictions(costs: Costs, alpha: float) -> list[float]:
    """A draft model's speed-up at K = 0, 1, ... if each token is accepted with alpha."""
    found, expected = [1.0], 1.0
    for k in range(1, len(costs.rounds)):
        expected += alpha**k
        found.append(expected * costs.plain / (costs.drafting()[k] + costs.rounds[k]))
    return found
