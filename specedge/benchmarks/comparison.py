"""Comparison of plain and speculative decoding of one prompt by the same code path."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from specedge.request import AUTO, Coupling
from specedge.runtime.planning.plans import PLANNED
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.requests.stats import Stats, as_dict
from specedge.runtime.requests.stream import Generation
from specedge.runtime.sampling.history import common_prefix_length

from ..theory.formulas import speedup
from .measure import seconds_per_token
from .summary import host_seconds_per_round, seconds_per_draft_pass, seconds_per_target_pass


@dataclass(frozen=True)
class Comparison:
    """Medians over repeats of plain and speculative decoding.

    `speedup` is the median of the paired ratios of seconds per new token, without prefill. Costs
    are relative to a plain pass of the target, which takes `target_seconds`: of a draft pass, of a
    verify pass, and of the host's work per round. They are None without a draft model; the
    prediction is None unless each draft token takes a pass.
    """

    plain: Generation
    speculative: Generation
    greedy: bool
    coupled: bool
    exact: bool
    repeats: int
    num_draft_tokens: int | str
    plain_seconds: float
    speculative_seconds: float
    speedup: float
    speedup_range: tuple[float, float]
    predicted_speedup: float | None
    target_seconds: float
    draft_cost: float | None
    verify_cost: float
    host_cost: float

    @property
    def same_tokens(self) -> bool:
        """True if both generated the same tokens.

        They must at temperature 0, and with Gumbel coupling where passes are batch-invariant.
        """
        return self.plain.tokens == self.speculative.tokens

    @property
    def first_difference(self) -> int | None:
        """Position of the first different token, or the length of the shorter text."""
        if self.same_tokens:
            return None
        return common_prefix_length(self.plain.tokens, self.speculative.tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON values by field."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name in ("plain", "speculative"):
            generation = fields[name]
            fields[name] = {
                "text": generation.text,
                "tokens": generation.tokens,
                "finish_reason": generation.finish_reason,
                "lossy": generation.lossy,
                "stats": as_dict(generation.stats),
                "near_ties": [vars(tie) for tie in generation.near_ties],
            }
        return fields | {"same_tokens": self.same_tokens}


def compare(
    pipeline: Pipeline, prompt: str | Sequence[int], repeats: int, **request: Any
) -> Comparison:
    """Time plain and speculative decoding in alternating order, after a warm-up run of each.

    Args:
        pipeline: Loaded bundle.
        prompt: Text or token ids.
        repeats: Number of timed pairs.
        **request: Options of `generate`.
    """
    request["seed"] = 0 if request.get("seed") is None else request["seed"]
    num_draft_tokens = request.pop("num_draft_tokens", None)

    def run(plain: bool) -> Generation:
        pipeline.forget()
        return pipeline.generate(
            prompt, num_draft_tokens=0 if plain else num_draft_tokens, **request
        )

    plain, speculative = [run(True)], [run(False)]
    for i in range(repeats):
        for first in (True, False) if i % 2 else (False, True):
            (plain if first else speculative).append(run(first))
    return _summarize(plain[1:], speculative[1:], request)


def _summarize(
    plain: list[Generation], speculative: list[Generation], request: dict[str, Any]
) -> Comparison:
    pairs = zip(plain, speculative, strict=True)
    ratios = [seconds_per_token(p.stats) / seconds_per_token(s.stats) for p, s in pairs]
    base, all_stats = [g.stats for g in plain], [g.stats for g in speculative]
    target = median(map(seconds_per_target_pass, base))
    plain_host = median(map(host_seconds_per_round, base)) / target
    host = median(map(host_seconds_per_round, all_stats)) / target
    exact = median(stats.exact_seconds / stats.num_rounds for stats in all_stats) / target
    verify = median(map(seconds_per_target_pass, all_stats))
    stats = all_stats[0]
    drafts = [seconds for seconds in map(seconds_per_draft_pass, all_stats) if seconds is not None]
    draft_cost = median(drafts) / target if stats.num_draft_passes else None
    predicted = None
    k = speculative[0].num_draft_tokens
    if not isinstance(k, int):
        if speculative[0].drafter in (AUTO, *PLANNED):
            predicted = speculative[0].expected_speedup
    elif draft_cost is not None and stats.accepted_over_tested is not None and _is_model(stats):
        alpha, extra = stats.accepted_over_tested, host + exact
        predicted = speedup(alpha, k, draft_cost, verify / target, extra) * (1 + plain_host)
    return Comparison(
        plain=plain[0],
        speculative=speculative[0],
        greedy=not request.get("temperature"),
        coupled=request.get("coupling") == Coupling.GUMBEL,
        exact=bool(request.get("exact")),
        repeats=len(ratios),
        num_draft_tokens=speculative[0].num_draft_tokens,
        plain_seconds=median(map(_seconds, plain)),
        speculative_seconds=median(map(_seconds, speculative)),
        speedup=median(ratios),
        speedup_range=(min(ratios), max(ratios)),
        predicted_speedup=predicted,
        target_seconds=target,
        draft_cost=draft_cost,
        verify_cost=verify / target,
        host_cost=host,
    )


def _is_model(stats: Stats) -> bool:
    """Return True if each draft token took a pass, as the formula assumes."""
    return stats.num_draft_passes == stats.num_drafted


def _seconds(generation: Generation) -> float:
    return generation.stats.prefill_seconds + generation.stats.decode_seconds
