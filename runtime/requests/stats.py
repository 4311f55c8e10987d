"""Statistics of a request: acceptance, passes and time by part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from ..decoding.protocols import Round

PARTS = ("prefill", "draft", "verify", "sampling", "exact", "other", "noise")


@dataclass(frozen=True)
class Stats:
    """Statistics of a request. Seconds exclude the time between two pieces of a stream.

    A draft token is tested if no earlier one of its round was rejected: `accepted_over_tested`
    estimates the acceptance rate alpha, unless drafts are verified as blocks, which raises it;
    `accepted_over_drafted` is the rate that vLLM reports.
    They include tokens that the last round accepts beyond the request's end.
    Ratios are None if nothing was drafted. Passes are those of the loop, not of the prefill.
    Sources are drafters by name, several in a chain; the time of drafters without a model counts as
    sampling. `num_reused_tokens` is the prefix of the prompt that the cache held (prefix cache
    reuse). The first verify pass may read the end of the prompt, too: then the mean time of other
    verify passes, in a request of one round its share of the tokens, counts as verify and the rest
    as prefill. `num_exact_passes` and `exact_seconds` are those of the near-tie resolver;
    `noise_seconds` is the time to measure the noise, once a pipeline, and is no part of decoding or
    prefill.
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
        """Mean number of new tokens per round."""
        return _ratio(self.num_new_tokens, self.num_rounds)

    @property
    def accepted_over_tested(self) -> float | None:
        """Acceptance rate: accepted over tested draft tokens."""
        return _ratio(self.num_accepted, self.num_tested)

    @property
    def accepted_over_drafted(self) -> float | None:
        """Accepted over all draft tokens."""
        return _ratio(self.num_accepted, self.num_drafted)

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Acceptance rate by position in the draft."""
        pairs = zip(self.accepted_by_position, self.tested_by_position, strict=True)
        return [_ratio(accepted, tested) for accepted, tested in pairs]

    @property
    def decode_seconds(self) -> float:
        """Time without the prefill."""
        passes = self.draft_seconds + self.verify_seconds + self.exact_seconds
        return passes + self.sampling_seconds + self.other_seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Decoding time per new token, without the prefill."""
        return _ratio(self.decode_seconds, self.num_new_tokens)


def compute_stats(
    rounds: Sequence[Round],
    num_draft_tokens: int,
    seconds: Mapping[str, float],
    **counts: int,
) -> Stats:
    """Return the statistics of rounds.

    Args:
        rounds: Rounds of a request.
        num_draft_tokens: Number of positions to report at least.
        seconds: Seconds by part.
        **counts: Further fields.
    """
    drafted = Counter(chain.from_iterable(r.sources for r in rounds))
    tested = Counter(chain.from_iterable(r.sources[: r.num_accepted + 1] for r in rounds))
    accepted = Counter(chain.from_iterable(r.sources[: r.num_accepted] for r in rounds))
    num_positions = max([num_draft_tokens, *(r.num_drafted for r in rounds)])
    num_tested = Counter(min(r.num_accepted + 1, r.num_drafted) for r in rounds)
    num_accepted = Counter(r.num_accepted for r in rounds)
    tested_by_position = [_count_above(num_tested, i) for i in range(num_positions)]
    accepted_by_position = [_count_above(num_accepted, i) for i in range(num_positions)]
    times: dict[str, Any] = {f"{part}_seconds": seconds[part] for part in PARTS}
    return Stats(
        num_rounds=len(rounds),
        num_drafted=sum(r.num_drafted for r in rounds),
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


def _count_above(counts: Counter[int], limit: int) -> int:
    """Return the count of values above a limit."""
    return sum(count for value, count in counts.items() if value > limit)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def as_dict(stats: Stats) -> dict[str, Any]:
    """Return every field and every ratio by name."""
    properties = [name for name, value in vars(Stats).items() if isinstance(value, property)]
    return asdict(stats) | {name: getattr(stats, name) for name in properties}
