"""How likely a drafter's next tokens are to stand: counts, a prior, and forgetting."""

from __future__ import annotations

PRIOR = 0.5  # where nothing is known: a draft is tried at first, a few tokens at a time
PRIOR_WEIGHT = 2.0  # tests that this counts as,
TUNED_WEIGHT = 8.0  # and a prior that was measured;
PRIOR_MEMORY = 0.97  # what of them is left a round later
SHARED_WEIGHT = 10.0  # tests that all positions together count as, at each of them
MEMORY = 0.9  # what a round's counts keep at the next: half of them after 7 rounds


class Acceptance:
    """One drafter's, by position in the draft.

    The chance at a position is that of a token whose earlier ones stood. Positions that were rarely
    reached lean on all of them together, and these on the prior.
    """

    def __init__(self, measured: float | None = None) -> None:
        self.prior = PRIOR if measured is None else measured
        self._prior_weight = PRIOR_WEIGHT if measured is None else TUNED_WEIGHT
        self._accepted: list[float] = []
        self._tested: list[float] = []
        self._chances: list[float] = []

    def record(self, *runs: tuple[int, int]) -> None:
        """A round's runs of tokens: of each the first so many stood, and how many were drafted."""
        self._prior_weight *= PRIOR_MEMORY
        self._accepted = [MEMORY * count for count in self._accepted]
        self._tested = [MEMORY * count for count in self._tested]
        for num_accepted, num_drafted in runs:
            tested = min(num_accepted + 1, num_drafted)
            self._grow(tested)
            for i in range(tested):
                self._tested[i] += 1
                self._accepted[i] += i < num_accepted
        self._chances = []

    def chances(self, count: int) -> list[float]:
        """The chance at each of the first `count` positions, given that those before it stood."""
        if len(self._chances) < count:
            self._chances = self._estimate(count)
        return self._chances

    @property
    def shared(self) -> float:
        """The chance over all positions together."""
        accepted, tested = sum(self._accepted), sum(self._tested)
        weight = self._prior_weight
        return (accepted + weight * self.prior) / (tested + weight)

    def _estimate(self, count: int) -> list[float]:
        shared = self.shared
        self._grow(count)
        return [
            (accepted + SHARED_WEIGHT * shared) / (tested + SHARED_WEIGHT)
            for accepted, tested in zip(self._accepted, self._tested, strict=True)
        ]

    def _grow(self, count: int) -> None:
        missing = count - len(self._tested)
        if missing > 0:
            self._tested += [0.0] * missing
            self._accepted += [0.0] * missing
