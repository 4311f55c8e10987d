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
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specedge.options import Sampling

from ..loop.model import LanguageModel
from ..loop.round import Round
from ..sampling.history import History
from ..sampling.probabilities import probabilities
from .budget import Budget
from .report import FAILED, PASSED, SHORT, Finding
from .sampled import NAME, name_of
from .statistics import Array, Fit, Frequency, fit, frequency
from .subject import Sizes, Subject, cut, known

LENGTH = 2
LEAST_TEXTS = 400
LEAST_MASS = 1 / 64  # of a cell; rarer strings go together
CANDIDATES = 6  # prompts from which a setting takes the one where draft and target differ most

TESTS = 3  # of each setting; all together have the last two

NextToken = dict[tuple[int, ...], float]


@dataclass
class Judged:
    """Draft tokens: whether each was accepted, and the probability with which it was to."""

    accepted: list[bool] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Tested:
    """The tests of one setting: the strings of the first tokens, and how often draft tokens
    were accepted, the first of a round and those after one that was accepted.
    """

    prompt: str
    strings: Fit
    first: Frequency
    later: Frequency

    def p_values(self) -> dict[str, float]:
        """By the name of the test."""
        return {name: getattr(self, name).p_value for name in ("strings", "first", "later")}


def joint(subject: Subject, budget: Budget, settings: Sequence[Sampling], alpha: float) -> Finding:
    """Compare the counts of the first tokens' strings with the target's exact distribution, by
    setting. `alpha` is the probability of a false alarm of one test.
    """
    tested: dict[str, Tested] = {}
    together = Judged(), Judged()
    for i, sampling in enumerate(settings):
        setting = _Setting(subject, sampling)
        # Seeds of its own for each setting: with the same ones their texts would be alike.
        seeds = itertools.count(i, len(settings))
        found = setting.test(budget.share(1 / (len(settings) - i)), seeds, alpha)
        if found is not None:
            tested[name_of(sampling)] = found
            for whole, part in zip(together, (setting.first, setting.later), strict=True):
                whole.accepted += part.accepted
                whole.betas += part.betas
    frequencies = [frequency(judged.accepted, judged.betas, alpha) for judged in together]
    return _finding(tested, frequencies, len(settings), alpha)


class _Setting:
    """One way to draw, with both models' remembered rows."""

    def __init__(self, subject: Subject, sampling: Sampling) -> None:
        self._subject = subject
        self._sampling = sampling
        self._length = subject.longest(LENGTH)
        self._target = subject.remembered("target")
        self._draft = subject.remembered("draft")
        self._betas: dict[tuple[int, ...], float] = {}
        self.first = Judged()
        self.later = Judged()

    def test(self, budget: Budget, seeds: Iterable[int], alpha: float) -> Tested | None:
        """Draw while there is time; None if it is up before that begins."""
        subject = self._subject
        chosen = self._choose(budget)
        prompt = self._begin(chosen)
        distribution = self._distribution(prompt, budget)
        if budget.over:
            return None
        decoders = [subject.decoder(k, self._target, self._draft) for k in subject.ks]
        counts = dict.fromkeys(distribution, 0)
        for seed, decoder in zip(seeds, itertools.cycle(decoders), strict=False):
            rounds = list(decoder.rounds(prompt, self._sampling, seed, self._length))
            string = tuple(cut(rounds, self._length))
            self._note(prompt, string, rounds)
            while string not in counts:
                string = string[:-1]
            counts[string] += 1
            if budget.over:
                break
        return Tested(
            subject.prompts[chosen].name,
            fit(list(counts.values()), list(distribution.values()), alpha),
            frequency(self.first.accepted, self.first.betas, alpha),
            frequency(self.later.accepted, self.later.betas, alpha),
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
        models = (
            (self._target, self._subject.target_sizes),
            (self._draft, self._subject.draft_sizes),
        )
        return [self._row(model, sizes, prompt, string) for model, sizes in models]

    def _row(
        self, model: LanguageModel, sizes: Sizes, prompt: Sequence[int], string: tuple[int, ...]
    ) -> Array:
        fed = [known(token, sizes) for token in (*prompt, *string)]
        model.truncate(0)
        model.prefill(fed[:-1])
        distribution = probabilities(
            model.forward(fed[-1:])[-1].array(), self._sampling, History(prompt, string)
        )
        return distribution.row(self._subject.target_sizes.vocab_size)

    def _distribution(self, prompt: Sequence[int], budget: Budget) -> NextToken:
        """Probabilities of strings: a key stands for all that begin with it and with no longer key.
        The likeliest are told apart first."""
        distribution: NextToken = {(): 1.0}
        queue: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
        while queue and not budget.over:
            falling, string = heapq.heappop(queue)
            row = self._row(self._target, self._subject.target_sizes, prompt, string)
            row = row.astype(np.float64) / row.sum(dtype=np.float64)
            for token in np.flatnonzero(-falling * row >= LEAST_MASS):
                longer, mass = (*string, int(token)), -falling * float(row[token])
                distribution[longer] = mass
                distribution[string] = max(0.0, distribution[string] - mass)
                if len(longer) < self._length:
                    heapq.heappush(queue, (-mass, longer))
        return distribution

    def _note(
        self, prompt: Sequence[int], string: tuple[int, ...], rounds: Sequence[Round]
    ) -> None:
        """Which draft tokens were accepted, and with which probability each was to."""
        start = 0
        for round_ in rounds:
            for i in range(min(round_.num_accepted + 1, round_.num_drafted)):
                judged = self.later if i else self.first
                judged.accepted.append(i < round_.num_accepted)
                judged.betas.append(self._beta(prompt, string[: start + i]))
            start += len(round_.tokens)

    def _beta(self, prompt: Sequence[int], string: tuple[int, ...]) -> float:
        if string not in self._betas:
            target, draft = self._rows(prompt, string)
            self._betas[string] = float(np.minimum(target, draft).sum(dtype=np.float64))
        return self._betas[string]


def _finding(
    tested: dict[str, Tested], together: Sequence[Frequency], num_settings: int, alpha: float
) -> Finding:
    first, later = together
    facts: dict[str, Any] = {"all together": {"first": vars(first), "later": vars(later)}} | {
        name: {"prompt": found.prompt}
        | {test: vars(getattr(found, test)) for test in found.p_values()}
        for name, found in tested.items()
    }
    lines = [
        f"{'':{NAME}}  texts cells  p of: strings  first accepted  later accepted  "
        "would catch  at most off  after"
    ]
    lines += [_line(name, found) for name, found in tested.items()]
    lines.append(f"{'all together':{NAME}} {first.p_value:43.2g} {later.p_value:15.2g}")
    p_values = {name: found.p_values() for name, found in tested.items()}
    p_values["all together"] = {"first": first.p_value, "later": later.p_value}
    problems = [
        f"{name}: {_NAMES[test]}, p = {p:.1e}"
        for name, tests in p_values.items()
        for test, p in tests.items()
        if p < alpha
    ]
    if problems:
        summary = f"first tokens do not follow the target's joint distribution: {problems[0]}"
        return Finding("joint", FAILED, summary, tuple(problems[1:] + lines), facts)
    least = min((found.strings.num_samples for found in tested.values()), default=0)
    if len(tested) < num_settings or least < LEAST_TEXTS:
        least = least if len(tested) == num_settings else 0
        summary = f"only {least} texts of a setting, {LEAST_TEXTS} are needed"
        return Finding("joint", SHORT, summary, tuple(lines), facts)
    total = sum(found.strings.num_samples for found in tested.values())
    summary = f"the first {LENGTH} tokens of {total} texts follow the target's joint distribution"
    return Finding("joint", PASSED, summary, tuple(lines), facts)


_NAMES = {
    "strings": "strings are not as likely as the target says",
    "first": "the first draft token of a round is not accepted as often as the distributions say",
    "later": "draft tokens after an accepted one are not accepted as often as the distributions "
    "say",
}


def _line(name: str, found: Tested) -> str:
    strings = found.strings
    return (
        f"{name:{NAME}} {strings.num_samples:6} {strings.num_cells:5} {strings.p_value:14.2g} "
        f"{found.first.p_value:15.2g} {found.later.p_value:15.2g} {strings.would_catch:12.3f} "
        f"{strings.bound:12.3f}  {found.prompt}"
    )
