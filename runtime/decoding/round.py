"""A round, and the interfaces of those who have a part in it.

Drafters are in `drafters/`, plans in `planning/`, the referee in `exactness/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specedge.request import PLAIN
from specedge.sampling_options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logprobs import TokenLogprobs
from ..sampling.scores import Scores
from .verify import Draft, Verdict


class Drafter(Protocol):
    """Proposes tokens that may follow a text.

    Whatever it proposes, the text keeps the target's distribution, as long as each token comes with
    the distribution that it was drawn from, given all that came before it, or with None if it was
    chosen without randomness.
    """

    @property
    def name(self) -> str:
        """What statistics call its tokens."""

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        """Guess 0 to `max_tokens` tokens that follow `history`; uniforms [max_tokens or more].

        A smaller `max_tokens` must only shorten the guess, so that a seed's text does not depend on
        where a request ends. Token i is drawn with uniform i.
        """

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` tokens of the text; 0 begins another text."""


def sources(drafter: Drafter, draft: Draft) -> tuple[str, ...]:
    """The drafter's name of each token of its draft. -> [n]"""
    return tuple(draft.sources) or (drafter.name,) * len(draft.tokens)


@dataclass(frozen=True)
class NearTie:
    """A greedy choice whose lead is below the device's noise: by how much logits differ with the
    number of tokens in a pass.
    """

    position: int  # among the new tokens, from 0
    token: int  # the one chosen
    runner_up: int  # the next likeliest
    margin: float  # the lead, in the pass that decided


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
    """What the next round does. `num_draft_tokens` is K: the drafter may propose fewer, the round
    takes 2K + 1 uniforms all the same. `name` is the drafter's in statistics, PLAIN if K = 0.
    """

    name: str
    drafter: Drafter
    num_draft_tokens: int


class Plan(Protocol):
    """Decides each round before it begins."""

    @property
    def max_draft_tokens(self) -> int:
        """The largest K that it may decide on."""

    def next(self, history: History, left: int) -> Step:
        """The round after `history`, of which at most `left` tokens are still wanted.

        K must not depend on `left`, else a seed's text would depend on where a request ends.
        """

    def ended(self, round_: Round) -> None:
        """Learn what became of a round."""

    def truncate(self, length: int) -> None:
        """As of every drafter."""


class Referee(Protocol):
    """Reviews verdicts at temperature 0 where logits differ with the number of tokens in a pass."""

    def begin(self, num_rows: int) -> None:
        """The cache holds a request's prompt but its last token, `num_rows` rows, by passes that
        plain decoding shares.
        """

    def review(
        self,
        verdict: Verdict,
        tokens: list[int],
        scores: Scores,
        sampling: Sampling,
        history: History,
    ) -> tuple[Verdict, tuple[NearTie, ...]]:
        """The verdict on drafted tokens [n], perhaps another one, and the near-ties in it.

        Leaves at least all committed tokens but the last in the target's cache.

        scores [n + 1 rows] of the target's last pass, over the end of `history` and the tokens
        """
