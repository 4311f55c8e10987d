"""What a run did, by the field's names, and where its time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..decoding.protocols import Round

PARTS = ("prefill", "draft", "verify", "sampling", "exact", "other", "noise")


@dataclass(frozen=True)
class Stats:
    """What a run did. Seconds exclude the time between two pieces of a stream.

    A draft token is tested if no earlier one of its round was rejected: `accepted_over_tested`
    estimates alpha, the mean acceptance rate; `accepted_over_drafted` is what vLLM reports.
    Ratios are None where nothing was drafted. Passes are those of the loop, not of the prefill.
    Sources are the drafters by name, of which a chain has several; what they do without a model
    counts as sampling.
    `num_reused_tokens` are those of the prompt that the cache held from an earlier request.
    The first round's pass may read the end of the prompt, too: then as much of it is the round's as
    other rounds' passes took, in a request of one round its share of the tokens, and the rest the
    prefill's.
    `num_exact_passes` and `exact_seconds` are what deciding near-ties cost; `noise_seconds` is for
    measuring the noise, once a pipeline, and counts neither as decoding nor as prefill.
    """

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_new_tokens: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_draft_passes: int = 0
    num_target_passes: int = 0
    num_exact_passes: int = 0
    tested_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    tested_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sampling_seconds: float = 0.0
    exact_seconds: float = 0.0
    other_seconds: float = 0.0
    noise_seconds: float = 0.0

    @property
    def tokens_per_round(self) -> float | None:
        """New tokens for each pass of the target."""
        return _ratio(self.num_new_tokens, self.num_rounds)

    @property
    def accepted_over_tested(self) -> float | None:
        """The share of judged draft tokens that were accepted: alpha's estimate."""
        return _ratio(self.num_accepted, self.num_tested)

    @property
    def accepted_over_drafted(self) -> float | None:
        """The share of all draft tokens that were accepted."""
        return _ratio(self.num_accepted, self.num_drafted)

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """The share accepted among those tested, for the first, second, ... draft token."""
        pairs = zip(self.accepted_by_position, self.tested_by_position, strict=True)
        return [_ratio(accepted, tested) for accepted, tested in pairs]

    @property
    def decode_seconds(self) -> float:
        """Everything but the prefill."""
        passes = self.draft_seconds + self.verify_seconds + self.exact_seconds
        return passes + self.sampling_seconds + self.other_seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding time of a new token, without the prefill."""
        return _ratio(self.decode_seconds, self.num_new_tokens)


def stats_of(
    rounds: Sequence[Round],
    num_draft_tokens: int,
    seconds: Mapping[str, float],
    **counts: int,
) -> Stats:
    """What rounds of a K of at least `num_draft_tokens` did, with counts that others keep."""
    drafted, tested, accepted = Counter[str](), Counter[str](), Counter[str]()
    for one in rounds:
        drafted.update(one.sources)
        tested.update(one.sources[: one.num_accepted + 1])
        accepted.update(one.sources[: one.num_accepted])
    most = max([num_draft_tokens, *(one.num_drafted for one in rounds)])
    tested_of = Counter(min(one.num_accepted + 1, one.num_drafted) for one in rounds)
    accepted_of = Counter(one.num_accepted for one in rounds)
    tested_by_position = [_above(tested_of, i) for i in range(most)]
    accepted_by_position = [_above(accepted_of, i) for i in range(most)]
    times: dict[str, Any] = {f"{part}_seconds": seconds[part] for part in PARTS}
    return Stats(
        num_rounds=len(rounds),
        num_drafted=sum(one.num_drafted for one in rounds),
        num_tested=sum(tested_by_position),
        num_accepted=sum(accepted_by_position),
        tested_by_position=tested_by_position,
        accepted_by_position=accepted_by_position,
        drafted_by_source=dict(drafted),
        tested_by_source={name: tested[name] for name in drafted},
        accepted_by_source={name: accepted[name] for name in drafted},
        **times,
        **counts,
    )


def _above(counts: Counter[int], number: int) -> int:
    """How many of what is counted are larger than a number."""
    return sum(count for each, count in counts.items() if each > number)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def as_dict(stats: Stats) -> dict[str, Any]:
    """Every field and every ratio by its name."""
    properties = [name for name, value in vars(Stats).items() if isinstance(value, property)]
    return asdict(stats) | {name: getattr(stats, name) for name in properties}
