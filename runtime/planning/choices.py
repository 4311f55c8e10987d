"""What drafters offer for the next round, and what is chosen of it."""

from __future__ import annotations

from dataclasses import dataclass

PLAIN, MODEL = "plain", "model"


@dataclass(frozen=True)
class Offer:
    """What a drafter could propose in the next round.

    First come `ready` tokens that cost nothing, known by the name `source`; then, if a model drafts
    on, up to `room` tokens at a pass each, known by the name `model`, once it has read the `behind`
    tokens that it lacks. What is `watched` is judged in every round, so it needs no probes.
    """

    drafter: str
    source: str = ""
    ready: int = 0
    model: str = MODEL
    room: int = 0
    behind: int = 1
    watched: bool = False

    def learns(self, num_draft_tokens: int) -> str:
        """Whose acceptance a round of so many tokens tells of, its last ones'."""
        return self.model if num_draft_tokens > self.ready else self.source


@dataclass(frozen=True)
class Choice:
    """A drafter and K for one round, with what is expected of it.

    `kind` is "plain", "gain" or "probe"; `seconds` are the round's, by the table, `plain_seconds`
    those of the target for one token. Of the former, a model spends `reading` on what it missed. A
    probe of the drafter `learns` is accepted in for what would take `pace` seconds a token.
    """

    drafter: str
    num_draft_tokens: int
    kind: str
    expected_tokens: float
    seconds: float
    plain_seconds: float
    reading: float = 0.0
    learns: str = ""
    pace: float = 0.0
