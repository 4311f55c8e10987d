"""Planner: selects the drafter and K that maximize expected tokens per expected second.

It computes with costs and counts only, without a clock or randomness: the same cost table and the
same earlier rounds give the same choice, so that a seed reproduces its text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

from specedge.option_specs import NameEnum
from specedge.request import PLAIN, DrafterName

from .cost_table import COSTS_INTERVAL, CostTable, RoundCosts

MODEL, CHAIN, SUFFIX = DrafterName.MODEL, DrafterName.CHAIN, DrafterName.SUFFIX

MIN_GAIN = 1.03  # minimum speed-up over plain decoding; costs are rounded to a grid of 10%
AMORTIZATION_TOKENS = 32  # minimum number of tokens that a catch-up is amortized over
BUDGET_ROUNDS, BUDGET_SHARE = 1.5, 0.005  # exploration budget: plain rounds, and share of the time
MAX_STAKE = 0.5  # share of the rest of the budget that a round may lose; the rest is for later ones
MIN_PROBABILITY = 0.01  # longer drafts are not considered below this probability of acceptance

PRIOR_RATE = 0.5  # prior acceptance rate of a drafter without measurements
PRIOR_TESTS = 4.0  # weight of the prior rate, in tests
POSITION_TESTS = 3.0  # weight of the previous position's rate, in tests
CONFIDENCE_STEPS = 64  # grid of the minimum confidence, so that plans are short
DECAY = 0.94  # decay of earlier tests: a weight of one half after 11 tests


class ChoiceReason(NameEnum):
    """Reason for the choice of drafter and K in a round."""

    PLAIN = "plain"
    GAIN = "gain"
    PROBE = "probe"
    INVESTMENT = "investment"  # probe with a catch-up that exceeds the exploration budget


@dataclass(frozen=True)
class DraftOption:
    """Draft that a drafter could propose in the next round.

    Attributes:
        drafter: Name of the drafter.
        source: Drafter of the first `num_free` tokens.
        num_free: Number of tokens that need no draft pass.
        max_model_tokens: Maximum number of tokens after them, each of which takes a draft pass.
        num_unread: Tokens of the text that are not in the draft model's cache.
        max_unread: Maximum number of them that its first pass reads without a catch-up.
        predicted_rates: Acceptance rates of the first `num_free` tokens; empty if not predicted.
        reads_states: True for a draft head, which reads a row for each token since its last draft,
            and then one token at a time, the free ones, too.
    """

    drafter: str
    source: str = MODEL
    num_free: int = 0
    max_model_tokens: int = 0
    num_unread: int = 1
    max_unread: int = 2
    predicted_rates: Sequence[float] = ()
    reads_states: bool = False


@dataclass(frozen=True)
class RoundChoice:
    """Drafter and K of one round, with the expected tokens and time.

    Attributes:
        drafter: Name of the drafter; PLAIN if K = 0.
        num_draft_tokens: K.
        reason: Reason for the choice.
        expected_tokens: Expected number of tokens of the round.
        seconds: Time of the round by the cost table, without host work per token.
        plain_seconds: Time of plain decoding for one token, without host work per token.
        catch_up_seconds: Part of `seconds` for the draft model's catch-up.
        seconds_per_token: Expected time per token, with the amortized catch-up.
    """

    drafter: str
    num_draft_tokens: int
    reason: ChoiceReason
    expected_tokens: float
    seconds: float
    plain_seconds: float
    catch_up_seconds: float = 0.0
    seconds_per_token: float = 0.0


class AcceptanceEstimate:
    """Acceptance rates by position in a draft, as exponential averages with a prior.

    The prior of the first position is the `expected` rate, that of a later one the rate of the
    previous position.
    """

    def __init__(self, expected: float = PRIOR_RATE) -> None:
        self.expected = expected
        self._accepted, self._tested = [PRIOR_TESTS * expected], [PRIOR_TESTS]
        self._rates: list[float] = []
        self._num_correct, self._predicted = PRIOR_TESTS * PRIOR_RATE, PRIOR_TESTS

    def record(self, position: int, is_accepted: bool) -> None:
        """Count the test of a token whose predecessors in the draft were accepted."""
        while position >= len(self._tested):
            self._accepted.append(0.0)
            self._tested.append(0.0)
        self._accepted[position] = DECAY * self._accepted[position] + is_accepted
        self._tested[position] = DECAY * self._tested[position] + 1
        self._rates.clear()

    def record_predictions(self, predicted: Sequence[float], num_accepted: int) -> None:
        """Count tests of tokens with predicted rates, of which the first ones were accepted."""
        self._predicted = DECAY * self._predicted + sum(predicted)
        self._num_correct = DECAY * self._num_correct + num_accepted

    def calibrate(self, predicted: Sequence[float]) -> list[float]:
        """Scale predicted rates by the ratio of observed to predicted acceptance so far."""
        factor = min(1.0, self._num_correct / self._predicted)
        return [factor * rate for rate in predicted]

    @property
    def rate(self) -> float:
        """Acceptance rate of the first position."""
        return self.rates(1)[0]

    def rates(self, count: int) -> list[float]:
        """Return the acceptance rate of each position given its predecessors. -> [count]"""
        rates = self._rates
        if not rates:
            rates.append(self._accepted[0] / self._tested[0])
        for i in range(len(rates), count):
            rate = rates[-1]
            if i < len(self._tested):
                rate = (self._accepted[i] + POSITION_TESTS * rate) / (
                    self._tested[i] + POSITION_TESTS
                )
            rates.append(rate)
        return rates[:count]

    def upper_rates(self, count: int) -> list[float]:
        """Return the rates plus the standard error of the first one. -> [count]"""
        error = sqrt(self.rate * (1 - self.rate) / self._tested[0])
        return [min(1.0, rate + error) for rate in self.rates(count)]


class Planner:
    """Choice of drafter and K for each round of one request, adapted after each round."""

    def __init__(
        self, table: CostTable, temperature: float, max_draft_tokens: int | None = None
    ) -> None:
        limit = table.max_draft_tokens
        self.table = table
        self.temperature = temperature
        self.max_draft_tokens = limit if max_draft_tokens is None else min(max_draft_tokens, limit)
        self.num_requests = 1  # that share passes
        self.acceptance: dict[str, AcceptanceEstimate] = {}
        self.reason_counts: Counter[ChoiceReason] = Counter()
        self.num_tokens = 0
        self.seconds = 0.0  # all rounds so far, by the table
        self.plain_seconds = 0.0  # plain decoding of the same tokens
        self.probe_loss = 0.0  # seconds lost by probes
        self.last_costs: RoundCosts | None = None
        self._plain: RoundChoice | None = None  # plain decoding at the last costs
        self._longest_catch_up = 0.0  # seconds

    def costs(self, length: int) -> RoundCosts:
        """Return the costs at about `length` tokens in the cache."""
        start = length // COSTS_INTERVAL * COSTS_INTERVAL
        middle = start + COSTS_INTERVAL // 2
        return self.table.at(middle, self.temperature == 0, self.num_requests)

    def estimate(self, source: str) -> AcceptanceEstimate:
        """Return the acceptance estimate of a drafter."""
        if source not in self.acceptance:
            mode = self.table.mode(self.temperature == 0)
            expected = mode.acceptance.get(source, PRIOR_RATE)
            if self.temperature > 1:  # rates were measured at 1, and fall as the temperature rises
                expected = min(expected, PRIOR_RATE)
            self.acceptance[source] = AcceptanceEstimate(expected)
        return self.acceptance[source]

    def choose(self, options: Sequence[DraftOption], length: int) -> RoundChoice:
        """Return the best option, or K = 0, at `length` tokens in the target's cache.

        The choice does not depend on the number of remaining tokens, so that a seed's text does not
        depend on where a request ends.
        """
        costs = self.costs(length)
        if self._plain is None or costs is not self.last_costs:
            self.last_costs = costs
            self._plain = RoundChoice(PLAIN, 0, ChoiceReason.PLAIN, 1.0, costs.plain, costs.plain)
        best: RoundChoice | None = None
        for option in options:
            choice = self._best_choice(option, costs)
            if choice is not None and (
                best is None or choice.seconds_per_token < best.seconds_per_token
            ):
                best = choice
        if best is not None and self._is_gain(best, costs):
            return best
        probes = (probe for option in options if (probe := self._probe(option, costs)))
        return next(probes, None) or self._plain

    def invest(self, option: DraftOption, length: int) -> bool:
        """Count the catch-up of an option before a text's first round, if it is expected to pay."""
        costs = self.costs(length)
        limit = self._max_tokens(option)
        choice = self._fastest(option, costs, self.estimate(MODEL).upper_rates(limit))
        if choice is None or not self._is_gain(choice, costs):
            return False
        self.seconds += choice.catch_up_seconds
        self._longest_catch_up = max(self._longest_catch_up, choice.catch_up_seconds)
        return True

    def early_end(self, choice: RoundChoice, max_model_tokens: int) -> tuple[int, float]:
        """Return K and the minimum confidence of a draft model's draft that may end early.

        A draft of the chosen K may also be longer where the model is confident. A further token
        pays if it is accepted with a higher probability than the tokens that its cost would yield
        at the chosen speed.
        """
        costs, chosen = self.last_costs, choice.num_draft_tokens
        assert costs is not None
        seconds = [verify + draft for verify, draft in zip(costs.verify, costs.draft, strict=True)]
        reading = choice.seconds - choice.catch_up_seconds - seconds[chosen]
        k = min(2 * chosen + 1, self.max_draft_tokens, max_model_tokens)
        while k > chosen and seconds[k] + reading > self._max_seconds(costs):
            k -= 1
        if k < 2:
            return chosen, 0.0
        token_seconds = (seconds[k] - seconds[1]) / (k - 1)
        rate = self.estimate(MODEL).rates(chosen + 1)[-1]
        confidence = token_seconds / choice.seconds_per_token / rate
        steps = max(1, round(CONFIDENCE_STEPS * confidence))
        if steps >= CONFIDENCE_STEPS:  # a further token does not pay
            return chosen, 0.0
        return k, steps / CONFIDENCE_STEPS

    def record(self, choice: RoundChoice, sources: Sequence[str], num_accepted: int) -> None:
        """Update the estimates with a round's draft sources and number of accepted tokens.

        A round without draft tokens, as at the end of a request, counts as plain.
        """
        if choice.reason == ChoiceReason.PLAIN:
            self.record_plain(choice)
            return
        self.num_tokens += num_accepted + 1
        self.reason_counts[choice.reason] += 1
        has_drafted = bool(sources) or choice.reason != ChoiceReason.GAIN
        seconds = choice.seconds if has_drafted else choice.plain_seconds
        if choice.drafter == MODEL and sources and self.last_costs is not None:
            verify, draft = self.last_costs.verify, self.last_costs.draft
            drafted, chosen = len(sources), choice.num_draft_tokens
            seconds += verify[drafted] + draft[drafted] - verify[chosen] - draft[chosen]
        plain_seconds = choice.plain_seconds * (num_accepted + 1)
        self.seconds += seconds
        self.plain_seconds += plain_seconds
        self._longest_catch_up = max(self._longest_catch_up, choice.catch_up_seconds)
        if choice.reason == ChoiceReason.PROBE:
            self.probe_loss = max(0.0, self.probe_loss + seconds - plain_seconds)
        # Only tested tokens count: the number of drafted ones depends on where the request ends.
        positions: Counter[str] = Counter()
        for i, source in enumerate(sources[: num_accepted + 1]):
            self.estimate(source).record(positions[source], i < num_accepted)
            positions[source] += 1

    def record_plain(self, choice: RoundChoice, num_rounds: int = 1) -> None:
        """Count rounds of plain decoding with the same choice."""
        self.num_tokens += num_rounds
        self.reason_counts[choice.reason] += num_rounds
        self.seconds += num_rounds * choice.seconds
        self.plain_seconds += num_rounds * choice.seconds

    @property
    def saved_seconds(self) -> float:
        """Seconds saved over plain decoding so far, by the table; negative for a loss."""
        return self.plain_seconds - self.seconds

    @property
    def expected_speedup(self) -> float | None:
        """Speed-up of the rounds so far over plain decoding, by the table."""
        if self.last_costs is None or not self.seconds:
            return None
        host = self.num_tokens * self.last_costs.token
        return (self.plain_seconds + host) / (self.seconds + host)

    @staticmethod
    def _is_gain(choice: RoundChoice, costs: RoundCosts) -> bool:
        """Return True if a choice is expected to be faster than plain decoding."""
        return (choice.seconds_per_token + costs.token) * MIN_GAIN < costs.plain + costs.token

    def _best_choice(self, option: DraftOption, costs: RoundCosts) -> RoundChoice | None:
        """Return the best K above 0 of an option, or None."""
        limit, num_free = self._max_tokens(option), option.num_free
        rates: Sequence[float] = self._free_rates(option)
        if limit > num_free:
            rates = [*rates, *self.estimate(MODEL).rates(limit - num_free)]
        return self._fastest(option, costs, rates[:limit], self._max_seconds(costs))

    def _fastest(
        self,
        option: DraftOption,
        costs: RoundCosts,
        rates: Sequence[float],
        max_seconds: float = inf,
    ) -> RoundChoice | None:
        """Return the K above 0 with the least time per token, or None.

        Tokens with acceptance rates a, b, ... give 1 + a + ab + ... expected tokens. The draft
        model's catch-up is amortized over the expected remaining tokens; its prefill of the free
        tokens is a cost of this round.

        Args:
            option: The option.
            costs: Costs of the round.
            rates: Acceptance rate of each draft token given its predecessors.
            max_seconds: Maximum time of the round without the catch-up.
        """
        num_free = option.num_free
        catch_up = prefill = amortized = 0.0
        if option.max_model_tokens:
            catch_up, prefill = self._reading_costs(option, costs)
            amortized = catch_up / max(AMORTIZATION_TOKENS, self.num_tokens)
        verify, draft = costs.verify, costs.draft
        probability = expected = 1.0
        best = (inf, 0, 1.0, 0.0)
        for k, rate in enumerate(rates, 1):
            probability *= rate
            if probability < MIN_PROBABILITY:
                break
            expected += probability
            seconds, extra = verify[k], 0.0
            if k > num_free:
                seconds, extra = seconds + draft[k - num_free] + prefill, amortized
            seconds_per_token = seconds / expected + extra
            if seconds_per_token < best[0] and seconds <= max_seconds:
                best = seconds_per_token, k, expected, seconds
        seconds_per_token, k, expected, seconds = best
        if not k:
            return None
        if k <= num_free:
            catch_up = 0.0
        return RoundChoice(
            option.drafter,
            k,
            ChoiceReason.GAIN,
            expected,
            seconds + catch_up,
            costs.plain,
            catch_up,
            seconds_per_token,
        )

    def _reading_costs(self, option: DraftOption, costs: RoundCosts) -> tuple[float, float]:
        """Return the costs of the model's catch-up, and of reading tokens in every round."""
        num_free, num_unread = option.num_free, option.num_unread
        if not option.reads_states:
            catch_up = costs.catch_up(num_unread, option.max_unread)
            reading = costs.catch_up(num_unread + num_free, option.max_unread) - catch_up
            return catch_up, reading
        num_usual = min(num_unread, self.max_draft_tokens + 1)  # since a draft in the last round
        reading = (num_usual - 1) * costs.prefill + costs.draft[num_free]
        return (num_unread - num_usual) * costs.prefill, reading

    def _max_tokens(self, option: DraftOption) -> int:
        return min(self.max_draft_tokens, option.num_free + option.max_model_tokens)

    def _budget(self, costs: RoundCosts) -> float:
        """Return the exploration budget in seconds."""
        return BUDGET_ROUNDS * costs.plain + BUDGET_SHARE * self.seconds

    def _max_seconds(self, costs: RoundCosts) -> float:
        """Return the maximum time of a round, of which all draft tokens may be rejected.

        It loses a share of the exploration budget and of the time saved so far, so that a few
        rejections do not end the use of a good drafter.
        """
        spare = self._budget(costs) + self.saved_seconds + self._longest_catch_up
        return costs.plain + MAX_STAKE * spare

    def _free_rates(self, option: DraftOption) -> list[float]:
        estimate = self.estimate(option.source)
        if option.predicted_rates:
            return estimate.calibrate(option.predicted_rates[: option.num_free])
        return estimate.rates(option.num_free)

    def _probe(self, option: DraftOption, costs: RoundCosts) -> RoundChoice | None:
        """Return a probe of one draft token; None if it exceeds the budget or cannot give a gain.

        The first catch-up of the draft model may exceed the budget if it pays off over the expected
        remaining tokens at the upper acceptance rates. Suffix decoding needs no probes: its
        predictions are compared with the text in every round.
        """
        source = option.source if option.num_free else MODEL
        limit = self._max_tokens(option)
        if source == SUFFIX or not limit:
            return None
        catch_up, seconds = 0.0, costs.verify[1]
        if not option.num_free:
            catch_up, prefill = self._reading_costs(option, costs)
            seconds += costs.draft[1] + prefill
        spent = max(self.probe_loss, -self.saved_seconds - self._longest_catch_up)
        spare = self._budget(costs) - spent - (seconds - costs.plain)
        reason, rates = ChoiceReason.PROBE, [1.0] * limit
        if catch_up > spare and not self._longest_catch_up:
            reason, rates = ChoiceReason.INVESTMENT, self.estimate(MODEL).upper_rates(limit)
            spare += catch_up
        if catch_up > spare:
            return None
        upper_bound = self._fastest(option, costs, rates)
        if upper_bound is None or upper_bound.seconds_per_token * MIN_GAIN >= costs.plain:
            return None
        expected = 1 + self.estimate(source).rate
        return RoundChoice(
            option.drafter, 1, reason, expected, seconds + catch_up, costs.plain, catch_up
        )


def predictions(costs: RoundCosts, alpha: float) -> list[float]:
    """Return the predicted speed-up of a draft model at K = 0, 1, ... for an acceptance rate."""
    speedups, expected = [1.0], 1.0
    for k in range(1, len(costs.verify)):
        expected += alpha**k
        seconds = costs.draft[k] + costs.verify[k] + costs.token * expected
        speedups.append(expected * (costs.plain + costs.token) / seconds)
    return speedups
