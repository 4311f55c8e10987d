"""Whether the first tokens after one prompt follow the target's joint distribution, over many
seeds.

The loop, the accept rule and the draws are the real ones; the models' rows are remembered by the
text before them, so that thousands of texts cost few passes. The caches play no part here: texts of
the real caches are what `sampled` draws.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling

from .budget import Budget
from .report import FAILED, PASSED, SHORT, Finding
from .sampled import NAME, Judged, name_of, refuted
from .statistics import Array, Fit, Frequency, fit
from .subject import Subject, cut, known, tested

LENGTH = 2
LEAST_TEXTS = 400
LEAST_MASS = 1 / 64  # of a cell; rarer strings go together
CANDIDATES = 6  # prompts from which a setting takes the one where draft and target differ most

TESTS = 3  # of each setting; all together have the last two

NextToken = dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Tested:
    """The tests of one setting: the strings of the first tokens, and how often draft tokens
    were accepted, the first of a round and those after one that was accepted.
    """

    strings: Fit
    first: Frequency
    later: Frequency


def joint(subject: Subject, budget: Budget, settings: Sequence[Sampling], alpha: float) -> Finding:
    """Compare the counts of the first tokens' strings with the target's exact distribution, by
    setting. `alpha` is the probability of a false alarm of one test.
    """
    found: dict[str, Tested] = {}
    prompts: dict[str, str] = {}
    first, later = Judged(), Judged()
    for i, sampling in enumerate(settings):
        setting = _Setting(subject, sampling)
        # Seeds of its own for each setting: with the same ones their texts would be alike.
        seeds = itertools.count(i, len(settings))
        tests = setting.test(budget.share(1 / (len(settings) - i)), seeds, alpha)
        if tests is not None:
            found[name_of(sampling)] = tests
            prompts[name_of(sampling)] = setting.prompt
            first.add(setting.first)
            later.add(setting.later)
    together = {"first": first.frequency(alpha), "later": later.frequency(alpha)}
    return _finding(found, prompts, together, len(settings), alpha)


class _Setting:
    """One way to draw, with both models' remembered rows."""

    def __init__(self, subject: Subject, sampling: Sampling) -> None:
        self._subject = subject
        self._sampling = sampling
        self._length = subject.longest(LENGTH)
        self._target = subject.remembered("target")
        self._draft = subject.remembered("draft")
        self._betas: dict[tuple[int, ...], float] = {}
        self.prompt = ""
        self.first = Judged()
        self.later = Judged()

    def test(self, budget: Budget, seeds: Iterable[int], alpha: float) -> Tested | None:
        """Draw while there is time; None if it is up before that begins."""
        subject = self._subject
        chosen = self._choose(budget)
        self.prompt = subject.prompts[chosen].name
        prompt = self._begin(chosen)
        distribution = self._distribution(prompt, budget)
        if budget.over:
            return None
        decoders = [subject.decoder(k, self._target, self._draft) for k in subject.ks]
        counts = dict.fromkeys(distribution, 0)
        for seed, decoder in zip(seeds, itertools.cycle(decoders), strict=False):
            rounds = list(decoder.rounds(prompt, self._sampling, seed, self._length))
            string = tuple(cut(rounds, self._length))
            for at, i, accepted in tested(rounds):
                judged = self.later if i else self.first
                judged.accepted.append(accepted)
                judged.betas.append(self._beta(prompt, string[:at]))
            while string not in counts:
                string = string[:-1]
            counts[string] += 1
            if budget.over:
                break
        return Tested(
            fit(list(counts.values()), list(distribution.values()), alpha),
            self.first.frequency(alpha),
            self.later.frequency(alpha),
        )

    def _begin(self, index: int) -> list[int]:
        prompt = self._subject.short_prompt(index, self._length)
        self._target.horizon = self._draft.horizon = len(prompt) + self._length
        return prompt

    def _choose(self, budget: Budget) -> int:
        """The prompt whose next token's distributions differ most in the likelier tokens, which
        have cells of their own: there a wrong rule shows most.
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

    def _rows(self, prompt: Sequence[int], string: tuple[int, ...]) -> list[Array]:
        """The target's and the draft's distributions of the token after a text. [V] each"""
        return [self._row(role, prompt, string) for role in ("target", "draft")]

    def _row(self, role: str, prompt: Sequence[int], string: tuple[int, ...]) -> Array:
        model = self._target if role == "target" else self._draft
        fed = [known(token, self._subject.sizes[role]) for token in (*prompt, *string)]
        model.truncate(0)
        model.prefill(fed[:-1])
        row, history = model.forward(fed[-1:])[-1], History(prompt, string)
        distribution = probabilities(row.array(), self._sampling, history, row.ids)
        return distribution.row(self._subject.sizes["target"].vocab_size)

    def _distribution(self, prompt: Sequence[int], budget: Budget) -> NextToken:
        """Probabilities of strings: a key stands for all that begin with it and with no longer key.
        The likeliest are told apart first."""
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

    def _beta(self, prompt: Sequence[int], string: tuple[int, ...]) -> float:
        if string not in self._betas:
            target, draft = self._rows(prompt, string)
            self._betas[string] = float(np.minimum(target, draft).sum(dtype=np.float64))
        return self._betas[string]


def _finding(
    found: dict[str, Tested],
    prompts: dict[str, str],
    together: dict[str, Frequency],
    num_settings: int,
    alpha: float,
) -> Finding:
    facts: dict[str, Any] = {"all together": {test: vars(one) for test, one in together.items()}}
    for name, tests in found.items():
        facts[name] = {"prompt": prompts[name]}
        facts[name] |= {test: vars(one) for test, one in vars(tests).items()}
    lines = [
        f"{'':{NAME}}  texts cells  p of: strings  first accepted  later accepted  "
        "would catch  at most off  after"
    ]
    lines += [_line(name, tests, prompts[name]) for name, tests in found.items()]
    first, later = together.values()
    lines.append(f"{'all together':{NAME}} {first.p_value:43.2g} {later.p_value:15.2g}")
    problems: list[str] = []
    for name, tests in found.items():
        problems += refuted(name, vars(tests), alpha)
    problems += refuted("all together", together, alpha)
    if problems:
        summary = f"first tokens do not follow the target's joint distribution: {problems[0]}"
        return Finding("joint", FAILED, summary, tuple(problems[1:] + lines), facts)
    texts = [tests.strings.num_samples for tests in found.values()]
    least = min(texts) if len(found) == num_settings else 0
    if least < LEAST_TEXTS:
        summary = f"only {least} texts of a setting, {LEAST_TEXTS} are needed"
        return Finding("joint", SHORT, summary, tuple(lines), facts)
    summary = (
        f"the first {LENGTH} tokens of {sum(texts)} texts follow the target's joint distribution"
    )
    return Finding("joint", PASSED, summary, tuple(lines), facts)


def _line(name: str, tests: Tested, prompt: str) -> str:
    strings = tests.strings
    return (
        f"{name:{NAME}} {strings.num_samples:6} {strings.num_cells:5} {strings.p_value:14.2g} "
        f"{tests.first.p_value:15.2g} {tests.later.p_value:15.2g} {strings.would_catch:12.3f} "
        f"{strings.bound:12.3f}  {prompt}"
    )
