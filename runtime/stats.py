"""What a run did, by the field's names, and where its time went."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from .loop.round import Round
from .loop.timing import Stopwatch


@dataclass(frozen=True)
class Stats:
    """What a run did. Seconds exclude the time between two pieces of a stream.

    A draft token is tested if no earlier one of its round was rejected: `accepted_over_tested`
    estimates alpha, the mean acceptance rate; `accepted_over_drafted` is what vLLM reports.
    Ratios are None where nothing was drafted. Passes are those of the loop, not of the prefill.
    Sources are the drafters by name, of which a chain has several; what they do without a model
    counts as sampling.
    `num_reused_tokens` are those of the prompt that the cache held from an earlier request.
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


class Recorder:
    """Collects the rounds of a run; `stats` may be asked for at any time."""

    def __init__(self, num_prompt_tokens: int, num_draft_tokens: int, watch: Stopwatch) -> None:
        self.rounds: list[Round] = []
        self.num_prompt_tokens = num_prompt_tokens
        self.num_new_tokens = 0
        self.num_drafted = 0
        self.tested = [0] * num_draft_tokens
        self.accepted = [0] * num_draft_tokens
        self.by_source = {name: Counter[str]() for name in ("drafted", "tested", "accepted")}
        self.watch = watch

    def record(self, round_: Round, num_kept: int) -> None:
        """Count a round of which `num_kept` tokens became output."""
        self.rounds.append(round_)
        self.num_new_tokens += num_kept
        self.num_drafted += round_.num_drafted
        missing = [0] * (round_.num_drafted - len(self.tested))
        self.tested += missing
        self.accepted += missing
        for i in range(round_.num_drafted):
            self.accepted[i] += i < round_.num_accepted
            self.tested[i] += i <= round_.num_accepted
        self.by_source["drafted"].update(round_.sources)
        self.by_source["tested"].update(round_.sources[: round_.num_accepted + 1])
        self.by_source["accepted"].update(round_.sources[: round_.num_accepted])

    def stats(self, **of_models: int) -> Stats:
        """The counts so far, with those that the models keep."""
        seconds = self.watch.seconds
        return Stats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_new_tokens=self.num_new_tokens,
            num_rounds=len(self.rounds),
            num_drafted=self.num_drafted,
            num_tested=sum(self.tested),
            num_accepted=sum(self.accepted),
            tested_by_position=list(self.tested),
            accepted_by_position=list(self.accepted),
            drafted_by_source=self._by_source("drafted"),
            tested_by_source=self._by_source("tested"),
            accepted_by_source=self._by_source("accepted"),
            prefill_seconds=seconds["prefill"],
            draft_seconds=seconds["draft"],
            verify_seconds=seconds["verify"],
            sampling_seconds=seconds["sampling"],
            exact_seconds=seconds["exact"],
            other_seconds=seconds["other"],
            noise_seconds=seconds["noise"],
            **of_models,
        )

    def _by_source(self, what: str) -> dict[str, int]:
        return {name: self.by_source[what][name] for name in self.by_source["drafted"]}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def as_dict(stats: Stats) -> dict[str, Any]:
    """Every field and every ratio by its name."""
    properties = [name for name, value in vars(Stats).items() if isinstance(value, property)]
    return asdict(stats) | {name: getattr(stats, name) for name in properties}
