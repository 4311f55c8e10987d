"""How likely a drafter's next token is to be accepted."""

from __future__ import annotations

PRIOR = 0.2  # of a drafter that nothing is known of: a few tokens of it are tried
TUNED_TESTS = 32.0  # what `specedge tune` measured counts as so many tests,
GUESSED_TESTS = 4.0  # and what else is expected as so many
MEMORY = 0.94  # what a round leaves of the tests before it: half after 11 rounds


class Acceptance:
    """One drafter's rate: accepted over tested tokens, of which earlier rounds' fade."""

    def __init__(self, expected: float = PRIOR, tests: float = GUESSED_TESTS) -> None:
        self.expected = expected
        self._accepted, self._tested = tests * expected, tests

    def record(self, num_accepted: int, num_tested: int) -> None:
        """A round has tested so many of its tokens."""
        self._accepted = MEMORY * self._accepted + num_accepted
        self._tested = MEMORY * self._tested + num_tested

    @property
    def rate(self) -> float:
        """The chance of a token whose earlier ones were accepted."""
        return self._accepted / self._tested
