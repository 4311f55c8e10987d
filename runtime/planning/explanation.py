"""Explanation of a request's plan: costs, acceptance rates, choices and gain, as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from specedge.request import PlannedRounds

from ..decoding.protocols import Plan, Round
from .planner import ChoiceReason, Planner, RoundChoice
from .plans import AutoPlan, summarize_rounds

ORIGINS = {
    "tune": "measured by 'specedge tune'",
    "load": "measured at the first load on this machine; 'specedge tune' is more precise",
    "assumed": "placeholders, as the models were not loaded from a bundle",
}
MAX_CHANGES = 40  # maximum number of choices listed


def explain(plan: Plan, rounds: Sequence[Round]) -> list[str]:
    """Return costs, acceptance rates, each change of the choice with its reason, and the gain."""
    if not isinstance(plan, AutoPlan):
        return [f"fixed or replayed rounds: {_count(rounds)}"]
    planner = plan.planner
    return [
        f"costs: {ORIGINS[planner.table.origin]}",
        *_costs(planner),
        *(_acceptance(planner, name) for name in sorted(planner.acceptance)),
        *_changes(plan.changes),
        f"rounds: {_count(rounds)}",
        *_gain(planner),
    ]


def _costs(planner: Planner) -> list[str]:
    costs = planner.last_costs
    if costs is None:
        return []
    ks = [k for k in (0, 1, 2, 4, 8, 16) if k < len(costs.verify)]
    verify = [f"{k}: {_ms(costs.verify[k])}" for k in ks]
    draft = [f"{k}: {_ms(costs.draft[k])}" for k in ks[1:]]
    return [
        f"  verify pass and host work by K, ms: {', '.join(verify)}",
        f"  draft passes by K, ms: {', '.join(draft)}; prefill per token: {_ms(costs.prefill)}",
    ]


def _acceptance(planner: Planner, name: str) -> str:
    estimate = planner.acceptance[name]
    return (
        f"acceptance rate of {name}: {estimate.expected:.2f} expected at the start,"
        f" {estimate.rate:.2f} at the end"
    )


def _changes(changes: Sequence[tuple[int, RoundChoice]]) -> list[str]:
    lines = [f"round {number}: {_choice(choice)}" for number, choice in changes[:MAX_CHANGES]]
    if len(changes) > MAX_CHANGES:
        lines.append(f"{len(changes) - MAX_CHANGES} more changes")
    return lines


def _choice(choice: RoundChoice) -> str:
    if choice.reason == ChoiceReason.PLAIN:
        return "plain decoding, no draft is expected to be faster"
    seconds = choice.seconds - choice.catch_up_seconds
    speedup = choice.expected_tokens * choice.plain_seconds / seconds
    setting = f"{choice.drafter}, K = {choice.num_draft_tokens}"
    expected = f"{choice.expected_tokens:.2f} tokens expected in {_ms(seconds)} ms"
    if choice.catch_up_seconds:
        expected += f" after {_ms(choice.catch_up_seconds)} ms of catch-up"
    if choice.reason != ChoiceReason.GAIN:
        return f"{setting}: {choice.reason}, {expected}"
    return f"{setting}: {expected}, {speedup:.2f} times the speed of plain decoding"


def _count(rounds: Sequence[Round]) -> str:
    def setting(planned: PlannedRounds) -> tuple[str, int]:
        return planned[:2]

    groups = groupby(sorted(summarize_rounds(rounds), key=setting), key=setting)
    counts = {key: sum(entry[2] for entry in group) for key, group in groups}
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{count} of {name}" + (f" K = {k}" if k else "") for (name, k), count in ordered
    )


def _gain(planner: Planner) -> list[str]:
    if planner.expected_speedup is None:
        return []
    return [
        f"estimated from these costs: {_ms(planner.seconds)} ms, plain decoding"
        f" {_ms(planner.plain_seconds)} ms, speed-up {planner.expected_speedup:.2f};"
        f" {planner.reason_counts[ChoiceReason.PROBE]} probes lost {_ms(planner.probe_loss)} ms"
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
