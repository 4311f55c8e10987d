"""Test of the first tokens after a prompt against the target's joint distribution, over many seeds.

The decoder, the accept rule and the draws are real; the models' rows are memoized by the text
before them, so that thousands of texts cost few passes. The real caches are tested by
`sampled_text`.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling

from .audited_pair import (
    AuditedPair,
    AuditPrompt,
    conditional_acceptance,
    first_tokens,
    joint_ratio,
    tested_tokens,
)
from .budget import Budget
from .report import FAILED, PASSED, SHORT, CheckResult
from .sampled_text import NAME, AcceptanceSample, failed_tests
from .statistics import Array, ChiSquareTest, FrequencyTest, chi_square_test

LENGTH = 2
LEAST_TEXTS = 400
LEAST_MASS = 1 / 64  # minimum probability of a cell; rarer strings are pooled
CANDIDATES = 6  # prompts, of which the one where draft and target differ most is used

TESTS = 3  # tests per setting; the last two are also applied to all settings

NextToken = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class SettingTests:
    """Tests of one setting.

    Attributes:
        strings: Counts of the first tokens' strings.
        first: Acceptance of the first draft token of a round.
        later: Acceptance of draft tokens after an accepted one.
    """

    strings: ChiSquareTest
    first: FrequencyTest
    later: FrequencyTest


def joint(
    pair: AuditedPair, budget: Budget, settings: Mapping[str, Sampling], alpha: float
) -> CheckResult:
    """Compare counts of the first tokens' strings with the target's exact distribution, by setting.

    Args:
        pair: The pair.
        budget: Time limit.
        settings: Sampling options by name.
        alpha: Probability of a false alarm of one test.
    """
    results: dict[str, SettingTests] = {}
    prompts: dict[str, str] = {}
    first, later = AcceptanceSample(), AcceptanceSample()
    for i, (name, sampling) in enumerate(settings.items()):
        setting = _Setting(pair, sampling)
        # Separate seeds for each setting, so that texts are independent.
        seeds = itertools.count(i, len(settings))
        tests = setting.test(budget.share(1 / (len(settings) - i)), seeds, alpha)
        if tests is not None:
            results[name] = tests
            prompts[name] = setting.prompt
            first.add(setting.first)
            later.add(setting.later)
    together = {"first": first.frequency_test(alpha), "later": later.frequency_test(alpha)}
    return _finding(results, prompts, together, len(settings), alpha)


class _Setting:
    """Sampling options with both memoized models."""

    def __init__(self, pair: AuditedPair, sampling: Sampling) -> None:
        self._subject = pair
        self._sampling = sampling
        self._length = pair.longest(LENGTH)
        self._target = pair.memoized("target")
        self._draft = pair.memoized("draft")
        self._betas: dict[tuple[tuple[int, ...], int], float] = {}
        self.prompt = ""
        self.first = AcceptanceSample()
        self.later = AcceptanceSample()

    def test(self, budget: Budget, seeds: Iterable[int], alpha: float) -> SettingTests | None:
        """Draw texts until the time is up; None if it is up before the first."""
        pair = self._subject
        chosen = self._choose(budget)
        self.prompt = pair.prompts[chosen].name
        prompt = self._begin(chosen)
        distribution = self._distribution(prompt, budget)
        if budget.over:
            return None
        sizes = pair.sizes["target"] if pair.depends_on_rounds else None
        decoders = [pair.decoder(k, self._target, self._draft, sizes) for k in pair.ks]
        counts = dict.fromkeys(distribution, 0)
        for seed, decoder in zip(seeds, itertools.cycle(decoders), strict=False):
            rounds = list(
                decoder.rounds(
                    prompt.tokens, self._sampling, seed, self._length, source=prompt.source
                )
            )
            string = tuple(first_tokens(rounds, self._length))
            is_block = rounds[0].is_block
            for at, i, accepted in tested_tokens(rounds, self._length):
                sample = self.later if i else self.first
                sample.accepted.append(accepted)
                sample.betas.append(self._beta(prompt, string[:at], i if is_block else 0))
            while string not in counts:
                string = string[:-1]
            counts[string] += 1
            if budget.over:
                break
        return SettingTests(
            chi_square_test(list(counts.values()), list(distribution.values()), alpha),
            self.first.frequency_test(alpha),
            self.later.frequency_test(alpha),
        )

    def _begin(self, index: int) -> AuditPrompt:
        prompt = self._subject.short_prompt(index, self._length)
        self._target.horizon = self._draft.horizon = len(prompt.tokens) + self._length
        if self._subject.readings is not None:  # a token may be several of the draft's
            self._draft.horizon = sys.maxsize
        return prompt

    def _choose(self, budget: Budget) -> int:
        """Return the index of the prompt whose distributions differ most in the likely tokens.

        These have separate cells, so the test is most sensitive there.
        """
        best = (-1.0, 0)
        for i in range(min(CANDIDATES, len(self._subject.prompts))):
            if i and budget.over:
                break
            target, draft = self._rows(self._begin(i), ())
            likely = target >= LEAST_MASS
            score = np.abs(target - draft)[likely].sum() * target[likely].sum()
            best = max(best, (float(score), -i))
        return -best[1]

    def _rows(self, prompt: AuditPrompt, string: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the target's and the draft's distributions of the token after a text. [V] each"""
        return self._row("target", prompt, string), self._row("draft", prompt, string)

    def _row(self, role: str, prompt: AuditPrompt, string: tuple[int, ...]) -> Array:
        model, tokens = self._target if role == "target" else self._draft, prompt.tokens
        reader = "target" if self._subject.depends_on_rounds else role
        fed = self._subject.reading(reader).read([*tokens, *string], 0)
        self._subject.open(role, prompt.source, model)
        model.truncate(0)
        model.prefill(fed[:-1])
        row, history = model.forward(fed[-1:])[-1], History(tokens, string)
        distribution = probabilities(row.array(), self._sampling, history, row.ids)
        return distribution.row(self._subject.sizes["target"].vocab_size)

    def _distribution(self, prompt: AuditPrompt, budget: Budget) -> NextToken:
        """Return probabilities of strings, the most probable ones expanded first.

        A key represents all strings that begin with it and with no longer key.
        """
        distribution: NextToken = {(): 1.0}
        queue: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while queue and not budget.over:
            falling, string = heapq.heappop(queue)
            row = self._row("target", prompt, string)
            row = row.astype(np.float64) / row.sum(dtype=np.float64)
            for token in np.flatnonzero(-falling * row >= LEAST_MASS):
                longer, mass = (*string, int(token)), -falling * float(row[token])
                distribution[longer] = mass
                distribution[string] = max(0.0, distribution[string] - mass)
                if len(longer) < self._length:
                    heapq.heappush(queue, (-mass, longer))
        return distribution

    def _beta(self, prompt: AuditPrompt, string: tuple[int, ...], num_before: int) -> float:
        """Return the acceptance probability of the token after a string.

        `num_before` is the number of tokens before it in its block.
        """
        key = string, num_before
        if key not in self._betas:
            ratio, start = 1.0, len(string) - num_before
            for i in range(start, len(string)):
                target, draft = self._rows(prompt, string[:i])
                ratio = joint_ratio(target, draft, string[i], ratio)
            target, draft = self._rows(prompt, string)
            self._betas[key] = conditional_acceptance(target, draft, ratio)
        return self._betas[key]


def _finding(
    results: dict[str, SettingTests],
    prompts: dict[str, str],
    together: dict[str, FrequencyTest],
    num_settings: int,
    alpha: float,
) -> CheckResult:
    figures: dict[str, Any] = {
        "all together": {test: vars(test_result) for test, test_result in together.items()}
    }
    for name, tests in results.items():
        figures[name] = {"prompt": prompts[name]}
        figures[name] |= {test: vars(test_result) for test, test_result in vars(tests).items()}
    lines = [
        f"{'':{NAME}}  texts cells  p of: strings  first accepted  later accepted  "
        " detectable  upper bound  prompt"
    ]
    lines += [_line(name, tests, prompts[name]) for name, tests in results.items()]
    first, later = together.values()
    lines.append(f"{'all together':{NAME}} {first.p_value:43.2g} {later.p_value:15.2g}")
    problems: list[str] = []
    for name, tests in results.items():
        problems += failed_tests(name, vars(tests), alpha)
    problems += failed_tests("all together", together, alpha)
    if problems:
        summary = f"the first tokens do not follow the target's joint distribution: {problems[0]}"
        return CheckResult("joint", FAILED, summary, tuple(problems[1:] + lines), figures)
    texts = [tests.strings.num_samples for tests in results.values()]
    least = min(texts) if len(results) == num_settings else 0
    if least < LEAST_TEXTS:
        summary = f"a setting has only {least} texts; {LEAST_TEXTS} are required"
        return CheckResult("joint", SHORT, summary, tuple(lines), figures)
    summary = (
        f"the first {LENGTH} tokens of {sum(texts)} texts follow the target's joint distribution"
    )
    return CheckResult("joint", PASSED, summary, tuple(lines), figures)


def _line(name: str, tests: SettingTests, prompt: str) -> str:
    strings = tests.strings
    return (
        f"{name:{NAME}} {strings.num_samples:6} {strings.num_cells:5} {strings.p_value:14.2g} "
        f"{tests.first.p_value:15.2g} {tests.later.p_value:15.2g} {strings.would_catch:12.3f} "
        f"{strings.bound:12.3f}  {prompt}"
    )
