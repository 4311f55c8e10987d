"""Figures of a benchmark computed from its runs, without I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from operator import mul
from statistics import fmean, median
from typing import Any

import numpy as np

from specedge.request import AUTO, PLAIN, DrafterName
from specedge.runtime.planning.cost_table import CostTable, RoundCosts
from specedge.runtime.requests.stats import Stats

from ..theory.formulas import run_speedup
from ..theory.formulas import speedup as theory_speedup
from .measure import PLAIN_SETTING, BenchmarkPrompt, BenchmarkRuns, Setting, TimedRun


@dataclass(frozen=True)
class Figures:
    """Results of a setting on a set of prompts.

    `speedup` is the median over prompts and repeats of the ratio of seconds per token, plain
    decoding to the setting, without prefill; `low` and `high` are the quartiles, and
    `request_speedup` includes prefill. The setting `loses` if `speedup` is below 1.
    `overall_speedup` is the ratio of the total seconds of all prompts (median of the repeats),
    which formulas predict.

    `*_seconds` are seconds per new token, for each prompt the median of its repeats. The four
    acceptance rates are named as in `specedge.theory`; `alpha` is that of the draft model along the
    target's text, for any drafter.

    Costs are in plain passes of the target: c of a draft pass, v of a verify pass, o of the host's
    work per round. A prediction is None if its formula does not apply: `theorem_3_8`, `run_level`
    and `with_costs` assume a draft model and a fixed K. `run_level` is theorem 3.8 with the
    measured tokens per round; `with_costs` is (1 + o of plain rounds) E(alpha, K) / (K c + v + o)
    for long texts, and the expectation for texts of the measured lengths, whose last rounds differ.
    `by_position` uses the measured acceptance rates by position and passes.
    `held_out` predicts half of the prompts from the other half, for which `held_out_speedup` was
    measured, with the costs of `specedge tune` if available. An error is predicted over measured
    `overall_speedup`, minus 1.
    """

    set_name: str
    drafter: str
    num_draft_tokens: int | str
    num_prompts: int
    num_runs: int
    speedup: float
    low: float
    high: float
    loses: bool
    request_speedup: float
    overall_speedup: float
    seconds_per_token: float
    draft_seconds: float
    verify_seconds: float
    sampling_seconds: float
    rest_seconds: float
    num_new_tokens: int
    num_rounds: int
    num_draft_passes: int
    num_target_passes: int
    tokens_per_round: float
    alpha: float | None
    accepted_over_tested: float | None
    accepted_over_drafted: float | None
    tokens_over_rows: float | None
    acceptance_by_position: tuple[float | None, ...]
    draft_cost: float | None
    verify_cost: float
    host_cost: float
    theorem_3_8: float | None
    theorem_3_8_error: float | None
    run_level: float | None
    run_level_error: float | None
    with_costs: float | None
    with_costs_error: float | None
    by_position: float
    by_position_error: float
    held_out: float | None
    held_out_speedup: float | None
    held_out_error: float | None
    loop_share: float


def summarize(
    measured: BenchmarkRuns,
    prompts: Sequence[BenchmarkPrompt],
    alphas: Mapping[int, Sequence[float]],
    table: CostTable | None,
    greedy: bool,
) -> list[Figures]:
    """Return the figures of every set and setting, plain decoding first.

    Args:
        measured: Timed runs.
        prompts: Prompts.
        alphas: Acceptance rates on the target's text by prompt index.
        table: Costs measured by `specedge tune`, or None.
        greedy: True for greedy decoding.
    """
    figures: list[Figures] = []
    for name in dict.fromkeys(prompt.set_name for prompt in prompts):
        indices = [i for i, prompt in enumerate(prompts) if prompt.set_name == name]
        rates = [rate for i in indices for rate in alphas.get(i, ())]
        alpha = fmean(rates) if rates else None
        by_setting: dict[Setting, list[TimedRun]] = {setting: [] for setting, _ in measured.texts}
        for run in measured.runs:
            if run.prompt in indices:
                by_setting[run.setting].append(run)
        plain = by_setting[PLAIN_SETTING]
        for setting, runs in by_setting.items():
            texts = [measured.texts[setting, i] for i in indices]
            share = 1 - sum(t.kept for t in texts) / sum(len(t.tokens) for t in texts)
            lengths = {
                i: (len(prompts[i].tokens), text.kept)
                for i, text in zip(indices, texts, strict=True)
            }
            out = _held_out(setting, plain, runs, indices, lengths, table, greedy)
            num_tokens = [text.kept for text in texts]
            figures.append(
                _figures(name, setting, plain, runs, alpha, num_tokens, greedy, out, share)
            )
    return figures


def losing(figures: Sequence[Figures]) -> list[str]:
    """Return a line for each set in which a setting is slower than plain decoding."""
    lines = []
    for name in dict.fromkeys(row.set_name for row in figures):
        lost = [row for row in figures if row.set_name == name and row.loses]
        by_drafter: dict[str, list[str]] = defaultdict(list)
        for row in lost:
            by_drafter[row.drafter].append(str(row.num_draft_tokens))
        tries = [row for row in figures if row.set_name == name and row.drafter != PLAIN]
        if tries and len(lost) == len(tries):
            lines.append(
                f"{name}: speculative decoding is SLOWER with every setting; use plain decoding"
            )
        elif lost:
            named = "; ".join(
                drafter if ks == [AUTO] else f"{drafter} at K = {', '.join(ks)}"
                for drafter, ks in by_drafter.items()
            )
            lines.append(f"{name}: speculative decoding is SLOWER with {named}")
    return lines


def _figures(
    name: str,
    setting: Setting,
    plain: Sequence[TimedRun],
    runs: Sequence[TimedRun],
    alpha: float | None,
    num_tokens: Sequence[int],
    greedy: bool,
    held_out: tuple[float, float] | None,
    loop_share: float,
) -> Figures:
    total, base = total_of(runs), total_of(plain)
    ratios = [run.speedup for run in runs]
    low, middle, high = (float(q) for q in np.quantile(ratios, (0.25, 0.5, 0.75)))
    per_round = total.num_new_tokens / total.num_rounds
    k = setting.num_draft_tokens
    unit, draft = seconds_per_target_pass(base), seconds_per_draft_pass(total)
    c = None if draft is None else draft / unit
    v, o = seconds_per_target_pass(total) / unit, host_seconds_per_round(total) / unit
    plain_round = 1 + host_seconds_per_round(base) / unit
    drafting = 0.0 if c is None else c * total.num_draft_passes / total.num_rounds
    by_position = per_round * plain_round / (drafting + v + o)
    predicted, out_measured = held_out or (None, None)
    overall = overall_speedup(runs)
    return Figures(
        set_name=name,
        drafter=setting.drafter,
        num_draft_tokens=k,
        num_prompts=len({run.prompt for run in runs}),
        num_runs=len(runs),
        speedup=middle,
        low=low,
        high=high,
        loses=middle < 1,
        request_speedup=median(run.request_speedup for run in runs),
        overall_speedup=overall,
        **_of_total(total),
        alpha=alpha,
        tokens_over_rows=per_round / (k + 1) if isinstance(k, int) else None,
        draft_cost=c,
        verify_cost=v,
        host_cost=o,
        **_by_theory(setting, alpha, total, base, num_tokens, greedy, overall),
        by_position=by_position,
        by_position_error=by_position / overall - 1,
        held_out=predicted,
        held_out_speedup=out_measured,
        held_out_error=_error(predicted, out_measured),
        loop_share=loop_share,
    )


def _of_total(total: Stats) -> dict[str, Any]:
    """Return the fields computed from the totals of a setting's runs."""
    tokens = total.num_new_tokens
    return {
        "seconds_per_token": total.decode_seconds / tokens,
        "draft_seconds": total.draft_seconds / tokens,
        "verify_seconds": total.verify_seconds / tokens,
        "sampling_seconds": total.sampling_seconds / tokens,
        "rest_seconds": total.other_seconds / tokens,
        "num_new_tokens": tokens,
        "num_rounds": total.num_rounds,
        "num_draft_passes": total.num_draft_passes,
        "num_target_passes": total.num_target_passes,
        "tokens_per_round": tokens / total.num_rounds,
        "accepted_over_tested": total.accepted_over_tested,
        "accepted_over_drafted": total.accepted_over_drafted,
        "acceptance_by_position": tuple(total.acceptance_by_position),
    }


def _by_theory(
    setting: Setting,
    alpha: float | None,
    total: Stats,
    base: Stats,
    num_tokens: Sequence[int],
    greedy: bool,
    overall: float,
) -> dict[str, Any]:
    """Return predictions from alpha and costs with their errors; None without a draft model."""
    k, draft = setting.num_draft_tokens, seconds_per_draft_pass(total)
    predictions: dict[str, float | None]
    predictions = dict.fromkeys(("theorem_3_8", "run_level", "with_costs"))
    if (
        setting.drafter == DrafterName.MODEL
        and isinstance(k, int)
        and alpha is not None
        and draft is not None
    ):
        c = draft / seconds_per_target_pass(base)
        predictions["theorem_3_8"] = theory_speedup(alpha, k, c)
        predictions["run_level"] = run_speedup(total.num_new_tokens / total.num_rounds, k, c)
        costs = _run_costs(total, base, k)
        texts = ((count, costs) for count in num_tokens)
        predictions["with_costs"] = predicted_speedup([alpha] * k, texts, greedy)
    return predictions | {
        f"{name}_error": _error(value, overall) for name, value in predictions.items()
    }


def _held_out(
    setting: Setting,
    plain: Sequence[TimedRun],
    runs: Sequence[TimedRun],
    held_out: Sequence[int],
    lengths: Mapping[int, tuple[int, int]],
    table: CostTable | None,
    greedy: bool,
) -> tuple[float, float] | None:
    """Return the speed-up predicted from every other prompt, and the measured one."""
    k = setting.num_draft_tokens
    if setting.drafter != DrafterName.MODEL or not isinstance(k, int) or len(held_out) < 2:
        return None
    if table is not None and k > table.max_draft_tokens:
        return None
    first = {*held_out[::2]}
    totals = total_of([run for run in runs if run.prompt in first])
    base = total_of([run for run in plain if run.prompt in first])
    chances = acceptance_chances(totals.acceptance_by_position, totals.accepted_over_tested, k)
    texts = (
        (new, table.at(length + new // 2, greedy) if table else _run_costs(totals, base, k))
        for length, new in (lengths[prompt] for prompt in held_out[1::2])
    )
    rest = overall_speedup([run for run in runs if run.prompt not in first])
    return predicted_speedup(chances, texts, greedy), rest


def _run_costs(totals: Stats, base: Stats, k: int) -> RoundCosts:
    """Return costs from the runs of one K, linear in the draft tokens of a round.

    Plain rounds have none. The last rounds of a text may have fewer than K.
    """
    base_seconds, total_seconds = (
        seconds_per_target_pass(stats) + host_seconds_per_round(stats) for stats in (base, totals)
    )
    drafted = totals.num_drafted / totals.num_rounds
    slope = (total_seconds - base_seconds) / drafted if drafted else 0.0
    rounds = [base_seconds + slope * i for i in range(k + 1)]
    draft = seconds_per_draft_pass(totals) or 0.0
    return RoundCosts(rounds, [draft * i for i in range(k + 1)], 0.0)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


_COUNTS = (
    *("num_new_tokens", "num_rounds", "num_drafted", "num_tested", "num_accepted"),
    *("num_draft_passes", "num_target_passes"),
)
_SECONDS = ("draft_seconds", "verify_seconds", "sampling_seconds")


def total_of(runs: Sequence[TimedRun]) -> Stats:
    """Return the sum over prompts of the median seconds and the counts of a run.

    The counts of a prompt's runs are equal. The time of resolving near-ties is part of the other
    seconds. Prefill, noise measurement and tokens by drafter are not included.
    """
    by_prompt: dict[int, list[Stats]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(run.stats)
    total = Stats()
    for repeats in by_prompt.values():
        first = repeats[0]
        sums = {name: getattr(total, name) + getattr(first, name) for name in _COUNTS}
        for name in _SECONDS:
            sums[name] = getattr(total, name) + median(getattr(stats, name) for stats in repeats)
        other = median(stats.other_seconds + stats.exact_seconds for stats in repeats)
        total = Stats(
            **sums,
            other_seconds=total.other_seconds + other,
            tested_by_position=_added(total.tested_by_position, first.tested_by_position),
            accepted_by_position=_added(total.accepted_by_position, first.accepted_by_position),
        )
    return total


def _added(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    return [first + other for first, other in zip_longest(counts, more, fillvalue=0)]


def host_seconds_per_round(stats: Stats) -> float:
    """Return seconds per round outside of the graphs."""
    return (stats.sampling_seconds + stats.other_seconds) / stats.num_rounds


def seconds_per_target_pass(stats: Stats) -> float:
    """Return seconds per pass of the target."""
    return stats.verify_seconds / stats.num_target_passes


def seconds_per_draft_pass(stats: Stats) -> float | None:
    """Return seconds per pass of the draft model; None without one."""
    return stats.draft_seconds / stats.num_draft_passes if stats.num_draft_passes else None


def overall_speedup(runs: Sequence[TimedRun]) -> float:
    """Return the ratio of total seconds, plain decoding to the runs, median of the repeats.

    Long texts have more weight, as in the formulas.
    """
    speculative: dict[int, float] = defaultdict(float)
    plain: dict[int, float] = defaultdict(float)
    for run in runs:
        speculative[run.repeat] += run.stats.decode_seconds
        plain[run.repeat] += run.stats.decode_seconds * run.speedup
    return median(plain[repeat] / speculative[repeat] for repeat in speculative)


def text_rounds(
    chances: Sequence[float], rounds: Sequence[float], num_tokens: int, greedy: bool
) -> float:
    """Return the expected cost of a text.

    The i-th draft token of a round is accepted with probability `chances[i]` if those before it
    are. Surplus tokens of the last round are lost, which matters for short texts; a round of greedy
    decoding drafts at most one token fewer than are still needed.

    Args:
        num_tokens: Number of tokens of the text.
        chances: Acceptance rates by position. [K]
        rounds: Cost of a round of k draft tokens, k = 0 to K. [K + 1]
        greedy: True for greedy decoding.
    """
    reached = [1.0, *accumulate(chances, mul), 0.0]
    cost = [0.0]
    for missing in range(1, num_tokens + 1):
        k = min(len(rounds) - 1, missing - 1) if greedy else len(rounds) - 1
        rest = sum(
            (reached[n] - (reached[n + 1] if n < k else 0.0)) * cost[max(0, missing - n - 1)]
            for n in range(k + 1)
        )
        cost.append(rounds[k] + rest)
    return cost[num_tokens]


def model_rounds(costs: RoundCosts, chances: Sequence[float]) -> list[float]:
    """Return the seconds of a draft model's rounds of 0 to K tokens."""
    expected = [1.0, *(1 + total for total in accumulate(accumulate(chances, mul)))]
    return [costs.plain + costs.token] + [
        costs.draft[k] + costs.verify[k] + costs.token * expected[k]
        for k in range(1, len(chances) + 1)
    ]


def predicted_speedup(
    chances: Sequence[float], texts: Iterable[tuple[int, RoundCosts]], greedy: bool
) -> float:
    """Return the speed-up of a draft model over texts of given lengths and costs."""
    plain = seconds = 0.0
    for num_tokens, costs in texts:
        plain += num_tokens * (costs.plain + costs.token)
        seconds += text_rounds(chances, model_rounds(costs, chances), num_tokens, greedy)
    return plain / seconds


def acceptance_chances(
    by_position: Sequence[float | None], overall: float | None, num_draft_tokens: int
) -> list[float]:
    """Return acceptance rates by position, or the overall rate where no token was tested."""
    rates = [*by_position, *[None] * num_draft_tokens][:num_draft_tokens]
    return [(overall or 0.0) if rate is None else rate for rate in rates]
