"""Decision margins: the smallest change of logits that could change a decision of a round.

Another machine or version of ONNX Runtime may change each logit by up to e. At temperature T, this
changes a probability p by at most 2 e p (1 - p) / T for small e: the derivative
of the softmax if their logits increase by e and all others decrease by e. A margin is the smallest
e that could change a decision, in units of the logits. K draft tokens, V vocabulary entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specedge.runtime.decoding.verification import Verdict
from specedge.runtime.sampling.distribution import Floats
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Row
from specedge.runtime.sampling.logits_processors import process_logits
from specedge.sampling_options import Sampling


@dataclass(frozen=True)
class FilteredRow:
    """Distribution after the filters, and the margin of the filters.

    `probs` [V] are probabilities in double precision, 0 for removed tokens.
    """

    probs: Floats
    filter_margin: float


def greedy_margin(row: Row, sampling: Sampling, history: History) -> float:
    """Return half the difference of the two largest logits."""
    scores = process_logits(row.array(), sampling, history, row.ids)
    if len(scores) < 2:
        return math.inf
    second, first = np.partition(scores, -2)[-2:]
    return (float(first) - float(second)) / 2


def filter_row(row: Row, sampling: Sampling, history: History, vocab_size: int) -> FilteredRow:
    """Apply top-k, top-p and min-p to a row above temperature 0."""
    scores = process_logits(row.array(), sampling, history, row.ids).astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    descending, temperature, cuts = scores[order], sampling.temperature, [math.inf]
    num_kept = len(scores)
    if 0 < sampling.top_k < num_kept:
        num_kept = int(np.count_nonzero(descending >= descending[sampling.top_k - 1]))
        cuts.append(_gap(descending, num_kept))
    weights = np.exp((descending[:num_kept] - descending[0]) / temperature)
    if sampling.top_p < 1:
        sums = weights.cumsum() / weights.sum()
        cuts.append(_distance(sums, sampling.top_p) * temperature)
        num_kept = int(np.count_nonzero(sums - weights / weights.sum() < sampling.top_p))
        cuts.append(_gap(descending, num_kept))
    if sampling.min_p > 0:
        distances = np.log(weights / sampling.min_p)
        cuts.append(temperature * float(np.abs(distances).min()) / 2)
        num_kept = min(num_kept, int(np.count_nonzero(distances >= 0)))
    probs, kept = np.zeros(vocab_size), order[:num_kept]
    probs[kept if row.ids is None else row.ids[kept]] = weights[:num_kept]
    return FilteredRow(probs / probs.sum(), min(cuts))


def _gap(descending: Floats, num_kept: int) -> float:
    """Return half the difference of the last kept and the first removed logit."""
    if num_kept >= len(descending):
        return math.inf
    return (float(descending[num_kept - 1]) - float(descending[num_kept])) / 2


def sample_margin(probs: Floats, uniform: float, temperature: float) -> float:
    """Return the margin of a sample: the distance of its uniform from the cumulative sums."""
    return _distance(probs[probs > 0].cumsum()[:-1], uniform) * temperature


def _distance(sums: Floats, point: float) -> float:
    """Return the change of logits, at temperature 1, that moves a cumulative sum to `point`."""
    slack = 2 * sums * (1 - sums)
    inside = slack > 0  # the sum of all probabilities is always 1
    return float((np.abs(sums - point)[inside] / slack[inside]).min(initial=math.inf))


@dataclass(frozen=True)
class VerifiedDraft:
    """Draft verified above temperature 0.

    Attributes:
        tokens: Draft tokens. [K]
        drafted: Distributions of the draft. [K]
        targets: Distributions of the target. [K + 1]
        tests: Uniforms of the acceptance tests. [K or more]
        last: Uniform of the recovered or bonus token.
        temperature: Sampling temperature.
    """

    tokens: list[int]
    drafted: list[FilteredRow]
    targets: list[FilteredRow]
    tests: Floats
    last: float
    temperature: float

    def margin(self, verdict: Verdict) -> float:
        """Return the smallest margin of the tests, the target's filters and the last sample.

        A change of the logits by e changes probabilities by 2 e in total, a joint ratio p of i
        tokens by at most 4 i e p, and its residual by at most e (4 i p + 2 p + 2).
        """
        at, n, margins = verdict.num_accepted, len(self.tokens), list[float]()
        ratios, residuals = [1.0], list[Floats]()
        for i, token in enumerate(self.tokens):
            target, drafted = self.targets[i].probs, self.drafted[i].probs
            residuals.append(np.maximum(ratios[-1] * target - drafted, 0))
            ratios.append(min(1.0, ratios[-1] * float(target[token]) / float(drafted[token])))
        for i in range(max(1, at), n + 1):
            ratio, u = ratios[i], float(self.tests[i - 1])
            if i == n:
                gap, change = u - ratio, 4 * i * ratio
            else:
                gap = u * (1 - ratio) - (1 - u) * float(residuals[i].sum())
                change = 4 * i * ratio + (1 - u) * (2 * ratio + 2)
            margins.append(self.temperature * abs(gap) / change if change else math.inf)
        margins += [target.filter_margin for target in self.targets[: max(n, at + 1)]]
        if at == n:
            target = self.targets[n].probs
            return min(*margins, sample_margin(target, self.last, self.temperature))
        residual, total = residuals[at], float(residuals[at].sum())
        if not total:
            return 0.0
        change = 4 * at * ratios[at] + 2 * ratios[at] + 2
        sums = (residual / total).cumsum()
        residual_margin = float(np.abs(sums[residual > 0][:-1] - self.last).min(initial=math.inf))
        return min(*margins, self.temperature * residual_margin * total / change)
