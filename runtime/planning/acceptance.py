"""How likely a drafter's next tokens are to be accepted: counts, a prior, and forgetting."""

from __future__ import annotations

from math import sqrt

PRIOR = 0.3  # of a drafter that nothing is known of: a few tokens of it are tried
PRIOR_WEIGHT = 2.0  # tests that a prior counts as that was not measured, or if the guess is timid;
TUNED_WEIGHT = 128.0  # those that one counts as that `specedge tune` measured;
PRIOR_MEMORY = 0.99  # what of them is left after a round with tokens of the drafter
SHARED_WEIGHT = 10.0  # tests that all positions together count as, at each of them
MEMORY = 0.95  # what counts keep in such a round: half after 14
BOLD = 0.5  # standard errors that a bold guess is above the chance of all positions


class Acceptance:
    """One drafter's, by position in the draft.

    The chance at a position is that of a token whose earlier ones accepted. Positions that were
    rarely reached lean on all of them together, and these on the prior.
    """

    def __init__(self, prior: float | None = None, tuned: bool = False) -> None:
        self.prior = PRIOR if prior is None else prior
        self._prior_weight = TUNED_WEIGHT if tuned else PRIOR_WEIGHT
        self._accepted: list[float] = []
        self._tested: list[float] = []
        self._chances: dict[bool, list[float]] = {}

    def record(self, *runs: tuple[int, int]) -> None:
        """A round's runs of tokens: of each how many were accepted and tested."""
        self._prior_weight *= PRIOR_MEMORY
        self._accepted = [MEMORY * count for count in self._accepted]
        self._tested = [MEMORY * count for count in self._tested]
        for num_accepted, num_tested in runs:
            missing = num_tested - len(self._tested)
            self._tested += [0.0] * missing
            self._accepted += [0.0] * missing
            for i in range(num_tested):
                self._tested[i] += 1
            for i in range(num_accepted):
                self._accepted[i] += 1
        self._chances.clear()

    def chances(self, count: int, bold: bool = False) -> list[float]:
        """The chance at each of the first `count` positions, given that those before it accepted.

        A bold guess trusts the prior and errs upwards: what was little tried may be better than it
        seems, and not trying it would leave it so.
        """
        found = self._chances.get(bold, [])
        if len(found) < count:
            shared = self._bold if bold else self._shared(min(self._prior_weight, PRIOR_WEIGHT))
            found = self._chances[bold] = self._estimate(count, shared)
        return found

    @property
    def shared(self) -> float:
        """The chance over all positions together."""
        return self._shared(self._prior_weight)

    @property
    def by_position(self) -> list[float]:
        """The chance at each position that was tested."""
        return self._estimate(len(self._tested), self.shared)

    @property
    def _bold(self) -> float:
        shared, tests = self.shared, sum(self._tested) + self._prior_weight
        return min(1.0, shared + BOLD * sqrt(shared * (1 - shared) / (tests + 1)))

    def _shared(self, weight: float) -> float:
        return (sum(self._accepted) + weight * self.prior) / (sum(self._tested) + weight)

    def _estimate(self, count: int, shared: float) -> list[float]:
        known = SHARED_WEIGHT * shared
        found = [
            (accepted + known) / (tested + SHARED_WEIGHT)
            for accepted, tested in zip(self._accepted, self._tested, strict=True)
        ]
        return found + [shared] * (count - len(found))
