"""Why a request's rounds drafted what they did, in lines to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ..decoding.protocols import Plan, Round
from .choices import Choice, Kind
from .planner import Planner
from .plans import Auto, recorded

ORIGINS = {
    "tune": "measured by 'specedge tune'",
    "load": "measured when the bundle was first loaded here; 'specedge tune' measures more",
    "assumed": "assumed, for models that were not loaded from a bundle",
}
MAX_CHANGES = 40  # lines about single rounds; the rest are counted


def explain(plan: Plan, rounds: Sequence[Round]) -> list[str]:
    """Costs, what is known of the drafters, every change of mind with its reason, and the gain."""
    if not isinstance(plan, Auto):
        return [f"the rounds were given: {_counted(rounds)}"]
    planner = plan.planner
    return [
        f"costs: {ORIGINS[planner.table.origin]}",
        *_costs(planner),
        *(_acceptance(planner, name) for name in sorted(planner.acceptance)),
        *_changes(plan.changes),
        f"rounds: {_counted(rounds)}",
        *_gain(planner),
    ]


def _costs(planner: Planner) -> list[str]:
    costs = planner.last_costs
    if costs is None:
        return []
    known = [k for k in (0, 1, 2, 4, 8, 16) if k < len(costs.rounds)]
    rounds = [f"{k}: {_ms(costs.rounds[k])}" for k in known]
    passes = [f"{k}: {_ms(costs.passes[k])}" for k in known[1:]]
    return [
        f"  ms of a round's verify pass and the host's work, by K: {', '.join(rounds)}",
        f"  ms of a round's draft passes, by K: {', '.join(passes)}; a token to read:"
        f" {_ms(costs.reading)}",
    ]


def _acceptance(planner: Planner, name: str) -> str:
    known = planner.acceptance[name]
    return f"acceptance of {name}: {known.rate:.2f} at the end; {known.expected:.2f} was expected"


def _changes(changes: Sequence[tuple[int, Choice]]) -> list[str]:
    lines = [f"round {number}: {_choice(choice)}" for number, choice in changes[:MAX_CHANGES]]
    if len(changes) > MAX_CHANGES:
        lines.append(f"{len(changes) - MAX_CHANGES} more changes")
    return lines


def _choice(choice: Choice) -> str:
    if choice.kind == Kind.PLAIN:
        return "plain decoding, nothing that is ready promises more"
    seconds = choice.seconds - choice.reading
    speedup = choice.expected_tokens * choice.plain_seconds / seconds
    what = f"{choice.drafter}, K = {choice.num_draft_tokens}"
    expects = f"{choice.expected_tokens:.2f} tokens expected in {_ms(seconds)} ms"
    if choice.reading:
        expects += f" after {_ms(choice.reading)} ms of reading what it missed"
    if choice.kind == Kind.PROBE:
        return f"{what}: a probe, {expects}"
    return f"{what}: {expects}, {speedup:.2f} times the target alone"


def _counted(rounds: Sequence[Round]) -> str:
    def kind(planned: tuple[str, int, int]) -> tuple[str, int]:
        return planned[:2]

    groups = groupby(sorted(recorded(rounds), key=kind), key=kind)
    counts = {what: sum(times for _, _, times in found) for what, found in groups}
    shown = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{times} of {name}" + (f" K = {k}" if k else "") for (name, k), times in shown
    )


def _gain(planner: Planner) -> list[str]:
    if planner.expected_speedup is None:
        return []
    return [
        f"by these costs the rounds took {_ms(planner.seconds)} ms, the target alone"
        f" {_ms(planner.plain_seconds)}: {planner.expected_speedup:.2f} times as fast;"
        f" {planner.kinds[Kind.PROBE]} probes lost {_ms(planner.lost)} ms"
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
