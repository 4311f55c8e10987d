"""Synthetic benchmark results with chosen times and counts."""

from __future__ import annotations

from specedge.benchmarks.measure import (
    PLAIN_SETTING,
    BenchmarkPrompt,
    BenchmarkRuns,
    BenchmarkText,
    Setting,
    TimedRun,
)
from specedge.benchmarks.summary import summarize
from specedge.runtime.requests.stats import Stats

PROMPTS = [
    BenchmarkPrompt("code", "<script>alert('&')</script>", [1]),
    BenchmarkPrompt("code", "x", [1, 2]),
]
ROUNDS = 100


def runs(draft, verify, accepted, sampling=0.0, rest=0.0, plain_host=0.0):
    """Of each prompt two plain runs, a second a pass, and one of rounds with a draft token each.

    A draft pass, a verify pass and the host's parts take so many seconds; `accepted` of 100 are
    accepted.
    """
    plain = Stats(
        num_new_tokens=ROUNDS,
        num_rounds=ROUNDS,
        num_target_passes=ROUNDS,
        verify_seconds=float(ROUNDS),
        other_seconds=plain_host * ROUNDS,
    )
    model = Stats(
        num_new_tokens=ROUNDS + accepted,
        num_rounds=ROUNDS,
        num_drafted=ROUNDS,
        num_tested=ROUNDS,
        num_accepted=accepted,
        num_draft_passes=ROUNDS,
        num_target_passes=ROUNDS,
        tested_by_position=[ROUNDS],
        accepted_by_position=[accepted],
        draft_seconds=draft * ROUNDS,
        verify_seconds=verify * ROUNDS,
        sampling_seconds=sampling * ROUNDS,
        other_seconds=rest * ROUNDS,
    )
    seconds = draft + verify + sampling + rest
    speedup = (1 + plain_host) * (ROUNDS + accepted) / (ROUNDS * seconds)
    return [
        run
        for i in range(2)
        for run in (
            TimedRun(PLAIN_SETTING, i, 1, plain),
            TimedRun(PLAIN_SETTING, i, 1, plain),
            TimedRun(Setting("model", 1), i, 1, model, speedup, speedup),
        )
    ]


def measured(some):
    """These runs, with texts of 180 tokens that never loop."""
    settings = dict.fromkeys(run.setting for run in some)
    text = BenchmarkText(list(range(180)), 180)
    return BenchmarkRuns(some, {(setting, i): text for setting in settings for i in range(2)})


def figures(found):
    """Its figures, plain decoding's and the model's, where alpha is 0.8."""
    return summarize(found, PROMPTS, {0: [1.0, 0.6], 1: [0.8]}, None, True)


LOSING = measured(runs(draft=0.5, verify=1.9, accepted=80))
