"""Test of sampled text against the target's distribution, with real caches.

One pass of the target over the finished text gives the exact distribution of each token given the
tokens before it. By the randomized probability integral transform, a token's position in the
cumulative distribution is uniform and independent of earlier ones if and only if the token follows
its distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specedge.runtime.decoding.protocols import Drafter, Round
from specedge.runtime.decoding.verification import Draft
from specedge.runtime.drafters.draft_head import create_drafter
from specedge.runtime.sampling.distribution import Floats
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

from .audited_pair import (
    ROWS,
    AuditedPair,
    AuditPrompt,
    Wrapper,
    conditional_acceptance,
    first_tokens,
    joint_ratio,
    tested_tokens,
)
from .budget import Budget
from .report import FAILED, PASSED, SHORT, CheckResult
from .statistics import (
    Array,
    ChiSquareTest,
    FrequencyTest,
    chi_square_test,
    frequency_test,
    uniform_place,
)

SETTINGS = {
    "temperature 1": Sampling(1.0),
    "temperature 0.7": Sampling(0.7),
    "temperature 1, top-k 20": Sampling(1.0, top_k=20),
    "temperature 1, top-p 0.9": Sampling(1.0, top_p=0.9),
    "temperature 1, min-p 0.05": Sampling(1.0, min_p=0.05),
    "temperature 1, typical-p 0.9": Sampling(1.0, typical_p=0.9),
    "temperature 0.9, penalties 1.2/0.5/0.5, top-k 50": Sampling(
        0.9, top_k=50, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
    ),
}
NAME = 49  # width of the column with the setting's name
NUM_CELLS = 16  # cells of [0, 1); pairs use a grid of 4 by 4
TESTS = 4  # tests per setting, and for all settings
LEAST_TOKENS = 320  # minimum tokens per setting, for 20 expected per cell
LEAST_TEXT = 8


@dataclass
class AcceptanceSample:
    """Tested draft tokens: acceptance, and its exact probability (see `tested_tokens`)."""

    accepted: list[bool] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)

    def add(self, other: AcceptanceSample) -> None:
        """Append another sample."""
        for name, values in vars(self).items():
            setattr(self, name, values + getattr(other, name))

    def frequency_test(self, alpha: float) -> FrequencyTest:
        """Test the number of accepted tokens against its expectation."""
        return frequency_test(self.accepted, self.betas, alpha)


@dataclass
class TextSample(AcceptanceSample):
    """Texts of one setting: positions by descending probability and by descending d / t."""

    by_rank: list[float] = field(default_factory=list)
    by_lean: list[float] = field(default_factory=list)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    num_impossible: int = 0


@dataclass(frozen=True)
class TextTests:
    """Tests of one sample."""

    by_rank: ChiSquareTest
    by_lean: ChiSquareTest
    neighbours: ChiSquareTest
    acceptance: FrequencyTest


def sampled(
    pair: AuditedPair, budget: Budget, settings: Mapping[str, Sampling], alpha: float
) -> CheckResult:
    """Draw texts at every setting in turn until the time is up, then test them.

    Args:
        pair: The pair; K cycles through `pair.ks`.
        budget: Time limit.
        settings: Sampling options by name.
        alpha: Probability of a false alarm of one test.
    """
    length = _text_length(pair, budget, len(settings))
    samples = {name: TextSample() for name in settings}
    for i in itertools.count():
        for j, (name, sampling) in enumerate(settings.items()):
            if budget.over:
                break
            k = pair.ks[-1 - i % len(pair.ks)]
            prompt = pair.short_prompt(i, length)
            # A separate seed for each text, so that texts are independent.
            seed = i * len(settings) + j
            samples[name].add(_draw(pair, sampling, prompt, seed, k, length))
        if budget.over:
            break
    together = TextSample()
    for sample in samples.values():
        together.add(sample)
    return _finding(pair, samples | {"all together": together}, alpha)


def _text_length(pair: AuditedPair, budget: Budget, num_settings: int) -> int:
    """Return the length of a text that allows several texts of each setting in time."""
    in_time = budget.left / max(1e-9, 4 * num_settings * pair.seconds_per_pass)
    return pair.longest(max(LEAST_TEXT, min(ROWS, int(in_time))))


def _draw(
    pair: AuditedPair, sampling: Sampling, prompt: AuditPrompt, seed: int, k: int, length: int
) -> TextSample:
    """Decode one text; return the positions of its tokens in their distributions."""
    recorder = None
    if pair.depends_on_rounds:
        drafter = create_drafter(pair.draft, pair.sizes["draft"], pair.readings)
        recorder = _DraftRecorder(drafter)
    decoder = pair.decoder(k, drafter=recorder)
    rounds = list(decoder.rounds(prompt.tokens, sampling, seed, length, source=prompt.source))
    text = first_tokens(rounds, length)
    targets = [*pair.distributions("target", sampling, prompt, text)]
    if recorder is not None:
        drafts = recorder.distributions(rounds, targets)
    else:
        drafts = [*pair.distributions("draft", sampling, prompt, text)]
    random = np.random.default_rng(seed)
    sample, betas, ratio = TextSample(), [], 1.0
    places = [(i, round_.is_block) for round_ in rounds for i in range(len(round_.tokens))]
    for token, target, draft, (i, is_block) in zip(text, targets, drafts, places, strict=False):
        lean = _lean(target, draft)
        sample.by_rank.append(uniform_place(target, target, token, random.random()))
        sample.by_lean.append(uniform_place(target, lean, token, random.random()))
        sample.num_impossible += not target[token] > 0
        ratio = ratio if i else 1.0
        betas.append(conditional_acceptance(target, draft, ratio))
        if is_block:
            ratio = joint_ratio(target, draft, token, ratio)
    sample.pairs = list(zip(sample.by_lean[::2], sample.by_lean[1::2], strict=False))
    for at, _, accepted in tested_tokens(rounds, len(text)):
        sample.accepted.append(accepted)
        sample.betas.append(betas[at])
    return sample


class _DraftRecorder(Wrapper):
    """Drafter that records the drafts of another one, whose distributions depend on the rounds."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self._drafts: list[Draft] = []

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        draft: Draft = self._wrapped.propose(history, max_tokens, sampling, uniforms)
        self._drafts.append(draft)
        return draft

    def distributions(self, rounds: Sequence[Round], targets: Sequence[Array]) -> list[Array]:
        """Return the draft's distribution of each token; the target's of tokens without one."""
        rows = [*targets]
        starts = [0, *itertools.accumulate(len(round_.tokens) for round_ in rounds)]
        for at, i, _ in tested_tokens(rounds, len(rows)):
            draft = self._drafts[starts.index(at - i)]
            distribution = draft.distribution(i)
            if distribution is not None:
                rows[at] = distribution.row(len(targets[at]))
        return rows


def _lean(target: Array, draft: Array) -> Array:
    """Return d / t, which is above 1 for tokens that the draft prefers. [V], [V] -> [V]"""
    lean = np.zeros(len(target), np.float64)
    np.divide(draft, target, out=lean, where=target > 0)
    return lean


def _verdicts(sample: TextSample, alpha: float) -> TextTests:
    square = [int(4 * a) * 4 + int(4 * b) for a, b in sample.pairs]
    return TextTests(
        _uniform([int(NUM_CELLS * x) for x in sample.by_rank], alpha),
        _uniform([int(NUM_CELLS * x) for x in sample.by_lean], alpha),
        _uniform(square, alpha),
        sample.frequency_test(alpha),
    )


def _uniform(cells: list[int], alpha: float) -> ChiSquareTest:
    counts = np.bincount(np.array(cells, int), minlength=NUM_CELLS)
    return chi_square_test(counts, np.full(NUM_CELLS, 1 / NUM_CELLS), alpha)


def _finding(pair: AuditedPair, samples: dict[str, TextSample], alpha: float) -> CheckResult:
    problems, figures = [], {}
    lines = [
        f"{'':{NAME}} tokens  p of: rank  draft bias  serial pairs  accepted  "
        "     rate (expected)   detectable"
    ]
    for name, sample in samples.items():
        verdicts = _verdicts(sample, alpha)
        tests = {test: vars(result) for test, result in vars(verdicts).items()}
        count = len(sample.by_rank)
        figures[name] = {"num_tokens": count, "num_impossible": sample.num_impossible} | tests
        lines.append(_line(name, sample, verdicts))
        problems += failed_tests(name, vars(verdicts), alpha)
        # With noise, a filter may keep other tokens in the pass of the test.
        if sample.num_impossible and not pair.noise.get("target"):
            problems.append(
                f"{name}: {sample.num_impossible} tokens that the distribution does not allow"
            )
    count = len(samples["all together"].by_rank)
    catch = figures["all together"]["by_rank"]["would_catch"]
    least = min(len(sample.by_rank) for sample in samples.values())
    if problems:
        summary = f"{count} sampled tokens do not follow the target's distribution: {problems[0]}"
        return CheckResult("sampled", FAILED, summary, tuple(problems[1:] + lines), figures)
    if least < LEAST_TOKENS:
        summary = f"a setting has only {least} tokens; {LEAST_TOKENS} are required"
        return CheckResult("sampled", SHORT, summary, tuple(lines), figures)
    summary = (
        f"{count} sampled tokens follow the target's distribution; a total variation distance of "
        f"{catch:.3f} would have been detected"
    )
    return CheckResult("sampled", PASSED, summary, tuple(lines), figures)


def failed_tests(
    name: str, tests: Mapping[str, ChiSquareTest | FrequencyTest], alpha: float
) -> list[str]:
    """Return a line for each failed test of a setting."""
    return [
        f"{name}: {_MEANINGS[test]}, p = {result.p_value:.1e}"
        for test, result in tests.items()
        if result.p_value < alpha
    ]


_MEANINGS = {
    "by_rank": "frequencies of tokens differ from the target's probabilities",
    "by_lean": "tokens are biased towards the draft's distribution",
    "neighbours": "consecutive tokens are not independent",
    "acceptance": "the acceptance rate of draft tokens differs from its expectation",
    "strings": "frequencies of strings differ from the target's probabilities",
    "first": "the acceptance rate of the first draft token of a round differs from its expectation",
    "later": "the acceptance rate of later draft tokens differs from its expectation",
}


def _line(name: str, sample: TextSample, verdicts: TextTests) -> str:
    rank, lean, pairs, acceptance = (test.p_value for test in vars(verdicts).values())
    accepted = verdicts.acceptance
    return (
        f"{name:{NAME}} {len(sample.by_rank):6} {rank:11.2g} {lean:11.2g} {pairs:13.2g} "
        f"{acceptance:9.2g} {accepted.measured:11.3f} ({accepted.expected:.3f}) "
        f"{verdicts.by_rank.would_catch:13.3f}"
    )
