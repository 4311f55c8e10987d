"""Offers of drafters for the next round, and what is chosen of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specedge.option_specs import NameEnum
from specedge.request import PLAIN, DrafterName

MODEL, CHAIN = DrafterName.MODEL, DrafterName.CHAIN
COPYING = (DrafterName.LOOKUP, DrafterName.SUFFIX)  # they draft from the text, without a pass
__all__ = ["CHAIN", "COPYING", "MODEL", "PLAIN", "Choice", "Kind", "Offer"]


class Kind(NameEnum):
    """Why a round is as it is."""

    PLAIN = "plain"
    GAIN = "gain"
    PROBE = "probe"


@dataclass(frozen=True)
class Offer:
    """What a drafter could propose in the next round.

    First come `ready` tokens without a pass, of the drafter `source`, with `rates` if it knows
    their acceptance rates itself; then, if a model drafts on, up to `room` tokens at a pass each,
    once it has read the `behind` tokens that it lacks.
    """

    drafter: str
    source: str = MODEL
    ready: int = 0
    room: int = 0
    behind: int = 1
    rates: Sequence[float] = ()


@dataclass(frozen=True)
class Choice:
    """A drafter and K for one round, with what is expected of it.

    `seconds` are the round's by the table, `plain_seconds` those of plain decoding for one token,
    both without what every token costs the host. Of the former, a model spends `reading` on what it
    missed; `pace` is seconds a token, with a share of that.
    """

    drafter: str
    num_draft_tokens: int
    kind: Kind
    expected_tokens: float
    seconds: float
    plain_seconds: float
    reading: float = 0.0
    pace: float = 0.0
