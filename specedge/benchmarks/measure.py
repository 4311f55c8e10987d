"""Runs every setting of a benchmark on every prompt, in turn, and keeps what each run did.

A setting is a drafter and K; plain decoding is one of them. Within a repeat all settings take turns
on a prompt, in an order that moves on from prompt to prompt and is reversed in every other repeat.
A plain run comes before each few settings and after the last, and a setting's speed-up is over the
mean of the two plain runs around it, so a machine that gets slower or faster favours none.
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
LOOP_LENGTH = 8  # tokens in a row
LOOP_TIMES = 3

Progress = Callable[[float], None]  # told which share of the work is done


@dataclass(frozen=True)
class Setting:
    """A drafter, and K or "auto"."""

    drafter: str
    num_draft_tokens: int | str

    @property
    def options(self) -> dict[str, Any]:
        """The request's options for it."""
        if self == PLAIN_SETTING:
            return {"num_draft_tokens": 0}
        return {"drafter": self.drafter, "num_draft_tokens": self.num_draft_tokens}


PLAIN_SETTING = Setting(PLAIN, 0)


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue, and the set that they are of; `text` is shown to people."""

    set_name: str
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Run:
    """One request. `speedup` is over the plain runs around it, in seconds a new token without the
    prefill; `request_speedup` with it. Both are 1 for plain decoding.
    """

    setting: Setting
    prompt: int
    repeat: int
    stats: Stats
    speedup: float = 1.0
    request_speedup: float = 1.0


@dataclass(frozen=True)
class Text:
    """What a setting wrote for a prompt; tokens from `kept` on repeat themselves, and are left out
    of every run that is timed.
    """

    tokens: list[int]
    kept: int


@dataclass(frozen=True)
class Measured:
    """Every timed run, and what each setting wrote for each prompt (by its index)."""

    runs: list[Run]
    texts: dict[tuple[Setting, int], Text]


def settings(drafters: Sequence[str], lengths: Sequence[int]) -> list[Setting]:
    """Every drafter with every K; "auto" chooses its own."""
    found = []
    for drafter in dict.fromkeys(drafters):
        ks: Sequence[int | str] = [AUTO] if drafter == AUTO else list(dict.fromkeys(lengths))
        found += [Setting(drafter, k) for k in ks]
    return found


def measure(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    some: Sequence[Setting],
    repeats: int,
    progress: Progress = lambda share: None,
    **request: Any,
) -> Measured:
    """Run `some` settings and plain decoding, once to warm up and then `repeats` times.

    The run that warms up tells where a text begins to repeat itself. The timed runs, which write
    the same text again, end there. `request` are options of `generate`; each prompt has a seed of
    its own.
    """
    seed = request.pop("seed", None) or 0
    total = len(prompts) * (repeats + 1)
    texts: dict[tuple[Setting, int], Text] = {}
    runs: list[Run] = []
    for turn in range(repeats + 1):
        for index, prompt in enumerate(prompts):
            own = request | {"seed": seed + index, "ignore_eos": True}
            if turn == 0:
                for one in (PLAIN_SETTING, *some):
                    tokens = _run(pipeline, prompt, one, own).tokens
                    texts[one, index] = Text(tokens, max(1, length_before_loop(tokens)))
            else:
                runs += _cycle(pipeline, index, prompt, _order(some, index, turn), texts, own, turn)
            progress((turn * len(prompts) + index + 1) / total)
    return Measured(runs, texts)


def length_before_loop(tokens: Sequence[int]) -> int:
    """How many tokens come before the same 8 begin for the third time; all, if they never do.

    Acceptance and speed behind that say nothing about real text.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(tokens) - LOOP_LENGTH + 1):
        run = tuple(tokens[start : start + LOOP_LENGTH])
        seen[run] += 1
        if seen[run] == LOOP_TIMES:
            return start
    return len(tokens)


def _order(some: Sequence[Setting], index: int, turn: int) -> list[Setting]:
    """The settings from another one on for each prompt, backwards in every other repeat."""
    at = index % max(1, len(some))
    turned = [*some[at:], *some[:at]]
    return turned[::-1] if turn % 2 == 0 else turned


def _cycle(
    pipeline: Pipeline,
    index: int,
    prompt: Prompt,
    order: Sequence[Setting],
    texts: dict[tuple[Setting, int], Text],
    request: dict[str, Any],
    turn: int,
) -> Iterator[Run]:
    """Every setting once on one prompt, between plain runs."""

    def run(setting: Setting) -> Stats:
        limit = {"max_new_tokens": texts[setting, index].kept}
        return _run(pipeline, prompt, setting, request | limit).stats

    before = run(PLAIN_SETTING)
    yield Run(PLAIN_SETTING, index, turn, before)
    for start in range(0, len(order), GROUP):
        group = [(one, run(one)) for one in order[start : start + GROUP]]
        after = run(PLAIN_SETTING)
        yield Run(PLAIN_SETTING, index, turn, after)
        for one, stats in group:
            rates = (pace, _request_pace)
            speedups = [(rate(before) + rate(after)) / 2 / rate(stats) for rate in rates]
            yield Run(one, index, turn, stats, *speedups)
        before = after


def _run(
    pipeline: Pipeline, prompt: Prompt, setting: Setting, request: dict[str, Any]
) -> Generation:
    """One request, from empty caches: what an earlier one left in them would be time saved."""
    pipeline.forget()
    return pipeline.generate(prompt.tokens, **request | setting.options)


def pace(stats: Stats) -> float:
    """Seconds a new token: sampled runs may end at different lengths."""
    return stats.decode_seconds / stats.num_new_tokens


def _request_pace(stats: Stats) -> float:
    return (stats.prefill_seconds + stats.decode_seconds) / stats.num_new_tokens
