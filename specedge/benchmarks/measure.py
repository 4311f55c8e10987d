"""Timed runs of every setting of a benchmark on every prompt.

A setting is a drafter and K, or plain decoding. Within a repeat all settings take turns on a
prompt, in an order that is rotated for each prompt and reversed in every other repeat. Plain runs
surround each group of settings, and a speed-up is relative to the mean of the two around it, so
drift of the machine's speed favors no setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specedge.request import AUTO, PLAIN
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.requests.stats import Stats
from specedge.runtime.requests.stream import Generation

GROUP = 4  # settings between two plain runs
LOOP_LENGTH = 8  # length of a repeated sequence in tokens
LOOP_TIMES = 3

Progress = Callable[[float], None]  # called with the completed fraction


@dataclass(frozen=True)
class Setting:
    """Drafter and K, or "auto"."""

    drafter: str
    num_draft_tokens: int | str

    @property
    def options(self) -> dict[str, Any]:
        """Options of the request."""
        if self == PLAIN_SETTING:
            return {"num_draft_tokens": 0}
        return {"drafter": self.drafter, "num_draft_tokens": self.num_draft_tokens}


PLAIN_SETTING = Setting(PLAIN, 0)


@dataclass(frozen=True)
class BenchmarkPrompt:
    """Prompt as tokens, with its set and its text for display."""

    set_name: str
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class TimedRun:
    """Timed request.

    `speedup` is relative to the plain runs around it, in seconds per new token without prefill;
    `request_speedup` includes prefill. Both are 1 for plain decoding.
    """

    setting: Setting
    prompt: int
    repeat: int
    stats: Stats
    speedup: float = 1.0
    request_speedup: float = 1.0


@dataclass(frozen=True)
class BenchmarkText:
    """Generated tokens, which are repetitive from index `kept` on and not timed from there."""

    tokens: list[int]
    kept: int


@dataclass(frozen=True)
class BenchmarkRuns:
    """All timed runs, and the text of each setting and prompt index."""

    runs: list[TimedRun]
    texts: dict[tuple[Setting, int], BenchmarkText]


def settings(drafters: Sequence[str], lengths: Sequence[int]) -> list[Setting]:
    """Return every drafter with every K, and "auto" once."""
    combinations = []
    for drafter in dict.fromkeys(drafters):
        ks: Sequence[int | str] = [AUTO] if drafter == AUTO else list(dict.fromkeys(lengths))
        combinations += [Setting(drafter, k) for k in ks]
    return combinations


def measure(
    pipeline: Pipeline,
    prompts: Sequence[BenchmarkPrompt],
    candidates: Sequence[Setting],
    repeats: int,
    progress: Progress = lambda share: None,
    **request: Any,
) -> BenchmarkRuns:
    """Run plain decoding and settings once to warm up and then `repeats` times.

    The warm-up run finds where a text begins to repeat itself; the timed runs, which generate the
    same text, end there.

    Args:
        pipeline: Loaded bundle.
        prompts: Prompts.
        candidates: Settings other than plain decoding.
        repeats: Timed runs of each setting and prompt.
        progress: Receives the completed fraction.
        **request: Options of `generate`; prompt i has seed + i.
    """
    seed = request.pop("seed", None) or 0
    total = len(prompts) * (repeats + 1)
    texts: dict[tuple[Setting, int], BenchmarkText] = {}
    runs: list[TimedRun] = []
    for turn in range(repeats + 1):
        for index, prompt in enumerate(prompts):
            options = request | {"seed": seed + index, "ignore_eos": True}
            if turn == 0:
                for setting in (PLAIN_SETTING, *candidates):
                    tokens = _run(pipeline, prompt, setting, options).tokens
                    texts[setting, index] = BenchmarkText(
                        tokens, max(1, length_before_loop(tokens))
                    )
            else:
                runs += _cycle(
                    pipeline, index, prompt, _order(candidates, index, turn), texts, options, turn
                )
            progress((turn * len(prompts) + index + 1) / total)
    return BenchmarkRuns(runs, texts)


def length_before_loop(tokens: Sequence[int]) -> int:
    """Return the number of tokens before a sequence of 8 tokens begins for the third time.

    Acceptance rate and speed of repetitive text do not represent real text.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(tokens) - LOOP_LENGTH + 1):
        sequence = tuple(tokens[start : start + LOOP_LENGTH])
        seen[sequence] += 1
        if seen[sequence] == LOOP_TIMES:
            return start
    return len(tokens)


def _order(candidates: Sequence[Setting], index: int, turn: int) -> list[Setting]:
    """Return the settings rotated by prompt, and reversed in every other repeat."""
    at = index % max(1, len(candidates))
    turned = [*candidates[at:], *candidates[:at]]
    return turned[::-1] if turn % 2 == 0 else turned


def _cycle(
    pipeline: Pipeline,
    index: int,
    prompt: BenchmarkPrompt,
    order: Sequence[Setting],
    texts: dict[tuple[Setting, int], BenchmarkText],
    request: dict[str, Any],
    turn: int,
) -> Iterator[TimedRun]:
    """Yield a run of every setting on a prompt, between plain runs."""

    def run(setting: Setting) -> Stats:
        limit = {"max_new_tokens": texts[setting, index].kept}
        return _run(pipeline, prompt, setting, request | limit).stats

    before = run(PLAIN_SETTING)
    yield TimedRun(PLAIN_SETTING, index, turn, before)
    for start in range(0, len(order), GROUP):
        group = [(setting, run(setting)) for setting in order[start : start + GROUP]]
        after = run(PLAIN_SETTING)
        yield TimedRun(PLAIN_SETTING, index, turn, after)
        for setting, stats in group:
            rates = (seconds_per_token, _request_seconds_per_token)
            speedups = [(rate(before) + rate(after)) / 2 / rate(stats) for rate in rates]
            yield TimedRun(setting, index, turn, stats, *speedups)
        before = after


def _run(
    pipeline: Pipeline, prompt: BenchmarkPrompt, setting: Setting, request: dict[str, Any]
) -> Generation:
    """Run a request with empty caches, since prefix cache reuse would save time."""
    pipeline.forget()
    return pipeline.generate(prompt.tokens, **request | setting.options)


def seconds_per_token(stats: Stats) -> float:
    """Return seconds per new token: sampled texts may have different lengths."""
    return stats.decode_seconds / stats.num_new_tokens


def _request_seconds_per_token(stats: Stats) -> float:
    return (stats.prefill_seconds + stats.decode_seconds) / stats.num_new_tokens
