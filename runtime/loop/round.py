"""A round, and who has a part in it: the drafter that proposes, the plan that decides beforehand.

What is written here are the seams: drafters, plans and referees are of other rooms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specedge.options import Sampling
from specedge.request import PLAIN

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logprobs import TokenLogprobs
from ..sampling.scores import Scores
from .verify import Draft, Verdict


class Drafter(Protocol):
    """Proposes tokens that may follow a text.

    Whatever it proposes, the text keeps the target's distribution, as long as each token comes with
    the distribution that it was drawn from, given all that came before it. A token that follows
    from what came before without chance is certain.
    """

    @property
    def name(self) -> str:
        """What statistics call its tokens."""
        ...

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        """Guess 0 to `max_tokens` tokens that follow `history`; uniforms [max_tokens or more].

        With a smaller `max_tokens` it must be the beginning of the same guess, so that a seed's
        text does not depend on where a request ends. Token i is drawn with uniform i.
        """
        ...

    def truncate(self, length: int) -> None:
        """Forget every token past `length`: the target rejected them. 0 begins another text."""
        ...


def sources(drafter: Drafter, draft: Draft) -> tuple[str, ...]:
    """The drafter's name of each token of its draft. -> [n]"""
    return tuple(draft.sources) or (drafter.name,) * len(draft.tokens)


@dataclass(frozen=True)
class NearTie:
    """A choice by less than the noise: which new token it is, counted from 0, the token chosen, the
    next likeliest, and by how much the first led in the pass that decided.
    """

    position: int
    token: int
    runner_up: int
    margin: float


@dataclass(frozen=True)
class Round:
    """One draft-and-verify pass: the tokens it committed and how the draft fared.

    `logprobs` are those of the committed tokens, None if they were not asked for. `sources` names
    the drafter of each drafted token. `near_ties` are choices within the noise. `drafter` and
    `num_draft_tokens` are what was chosen for the round; a drafter may propose fewer.
    """

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    sources: tuple[str, ...] = ()
    near_ties: tuple[NearTie, ...] = ()
    drafter: str = PLAIN
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class Step:
    """What the next round does: K uniforms are drawn with, whatever the drafter makes of them."""

    name: str
    drafter: Drafter
    num_draft_tokens: int


class Plan(Protocol):
    """Decides each round before it begins."""

    @property
    def max_draft_tokens(self) -> int:
        """The largest K that it may decide on."""
        ...

    def next(self, history: History, left: int) -> Step:
        """The round after `history`, of which at most `left` tokens are still wanted."""
        ...

    def ended(self, round_: Round) -> None:
        """Learn what became of it."""
        ...

    def truncate(self, length: int) -> None:
        """Let every drafter forget all past `length`."""
        ...


class Referee(Protocol):
    """Reviews greedy verdicts on a device whose wider passes have other last bits."""

    def begin(self, num_rows: int) -> None:
        """A request's prompt is in the cache."""
        ...

    def review(
        self,
        verdict: Verdict,
        tokens: list[int],
        scores: Scores,
        sampling: Sampling,
        history: History,
    ) -> tuple[Verdict, tuple[NearTie, ...]]:
        """The verdict on drafted tokens [n], perhaps another one, and the near-ties in it.

        scores [n + 1 rows] of the target's last pass, over the end of `history` and the tokens
        """
        ...
