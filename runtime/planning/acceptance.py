"""Acceptance rate of a drafter's tokens by their position in a round."""

from __future__ import annotations

from collections.abc import Sequence

PRIOR = 0.5  # rate of a drafter that nothing is known of, low for one that pays
PRIOR_TESTS = 4.0  # that an expected rate counts as
TIE = 2.0  # tests that the rate of the position before counts as
MEMORY = 0.94  # weight that a test leaves to those before it: half after 11


class Acceptance:
    """Exponential averages of accepted over tested, by position.

    A position of which little is known takes after the one before it, the first after `expected`.
    """

    def __init__(self, expected: float = PRIOR) -> None:
        self.expected = expected
        self._accepted, self._tested = [PRIOR_TESTS * expected], [PRIOR_TESTS]
        self._rates: list[float] = []
        self._kept, self._promise = PRIOR_TESTS * PRIOR, PRIOR_TESTS

    def record(self, position: int, accepted: bool) -> None:
        """Count a test of a token whose earlier ones were accepted."""
        while position >= len(self._tested):
            self._accepted.append(0.0)
            self._tested.append(0.0)
        self._accepted[position] = MEMORY * self._accepted[position] + accepted
        self._tested[position] = MEMORY * self._tested[position] + 1
        self._rates.clear()

    def trust(self, promised: Sequence[float], num_accepted: int) -> None:
        """Count tests of tokens whose rates a drafter promised, the first of them accepted."""
        self._promise = MEMORY * self._promise + sum(promised)
        self._kept = MEMORY * self._kept + num_accepted

    def trusted(self, promised: Sequence[float]) -> list[float]:
        """Return the rates that a drafter promises by how many of earlier ones came true."""
        factor = min(1.0, self._kept / self._promise)
        return [factor * rate for rate in promised]

    @property
    def rate(self) -> float:
        """The rate of the first position."""
        return self.rates(1)[0]

    def rates(self, count: int) -> list[float]:
        """Return the rate of each position, given that the ones before are accepted. [count]"""
        rates = self._rates
        if not rates:
            rates.append(self._accepted[0] / self._tested[0])
        for i in range(len(rates), count):
            last = rates[-1]
            if i < len(self._tested):
                last = (self._accepted[i] + TIE * last) / (self._tested[i] + TIE)
            rates.append(last)
        return rates[:count]
