"""Greedy decoding over models that are not batch-invariant."""

import functools

import numpy as np
import pytest

from fakes import NoisyModel, TableModel, hashed_distribution, near_ties_distribution
from specedge.errors import OptionError, SpecEdgeError
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.invariance import measure_noise
from specedge.runtime.decoding.near_ties import NearTieResolver
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.logits import Logits
from specedge.sampling_options import Sampling

NOISE = 1e-3
LENGTH = 200
BOUND = 2 * NOISE  # plain decoding's logits move too
GREEDY = Sampling()
PENALISED = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.1)
NUM_TEXTS = 16
PROMPTS = [(seed % 7, seed % 5) for seed in range(NUM_TEXTS)]


@functools.cache
def distributions(seed, share):
    """A target's and a draft's that often agree."""
    target = near_ties_distribution(seed, 7, 2 * BOUND, share)
    other = near_ties_distribution(seed + 1000, 7, 0, 0)
    return target, functools.cache(lambda text: 0.7 * target(text) + 0.3 * other(text))


def decoder(seed, k, exact=False, share=0.1, bound=BOUND, drafter=DraftModel):
    """It, and its target."""
    distribution, draft_distribution = distributions(seed, share)
    target = NoisyModel(distribution, NOISE)
    resolver = NearTieResolver(target, bound, exact)
    plan = FixedPlan(drafter(TableModel(draft_distribution)), k)
    return SpeculativeDecoder(target, plan, Stopwatch(), resolver), target


def generate(seed, k, sampling=GREEDY, **options):
    """The tokens, the near-ties, and the target with the widths of its passes."""
    made, target = decoder(seed, k, **options)
    rounds = list(made.rounds(PROMPTS[seed], sampling, 0, LENGTH))
    ties = [tie for one in rounds for tie in one.near_ties if tie.position < LENGTH]
    return [t for one in rounds for t in one.tokens][:LENGTH], ties, target


class Silent(DraftModel):
    """Drafts nothing after every third token, so that passes of one row follow wide ones."""

    def propose(self, history, max_tokens, sampling, uniforms):
        return super().propose(
            history, max_tokens * (len(history.tokens) % 3 > 0), sampling, uniforms
        )


def first_difference(one, other):
    pairs = zip(one, other, strict=True)
    return next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)


@pytest.fixture(scope="module")
def plain():
    found = [generate(seed, 0) for seed in range(NUM_TEXTS)]
    assert not any(ties for _, ties, _ in found)
    return [tokens for tokens, _, _ in found]


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_choices_changed_by_noise_are_near_ties(plain, k):
    turned = 0
    for seed, expected in enumerate(plain):
        tokens, ties, _ = generate(seed, k)
        first = first_difference(tokens, expected)
        assert first is None or first in [tie.position for tie in ties]
        turned += first is not None
        for tie in ties:
            assert tokens[tie.position] == tie.token != tie.runner_up
            assert 0 <= tie.margin <= 2 * BOUND
    assert turned > NUM_TEXTS // 2


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_exact_tokens_equal_plain_decoding_under_noise(plain, k):
    for seed, expected in enumerate(plain):
        tokens, ties, target = generate(seed, k, exact=True)
        assert tokens == expected
        assert ties
        assert {1, k + 1} <= {*target.passes}


@pytest.mark.parametrize(("sampling", "drafter"), [(PENALISED, DraftModel), (GREEDY, Silent)])
def test_near_ties_do_not_depend_on_the_draft(sampling, drafter):
    turned = 0
    for seed in (0, 3, 11, 14, 15):
        options = {"sampling": sampling, "drafter": drafter}
        expected = generate(seed, 0, **options)[0]
        tokens, ties, _ = generate(seed, 3, **options)
        first = first_difference(tokens, expected)
        assert first is None or first in [tie.position for tie in ties]
        assert generate(seed, 3, exact=True, **options)[0] == expected
        turned += first is not None
    assert turned > 2


def test_exact_ties_are_listed_with_the_choice_of_plain_decoding(plain):
    tokens, ties, _ = generate(3, 4, exact=True)
    assert [tokens[tie.position] for tie in ties] == [tie.token for tie in ties]
    positions = [tie.position for tie in ties]
    assert positions == sorted({*positions})


class Ending:
    """Options that leave no token behind the twelfth."""

    def banned(self, history):
        return np.full(7, history.num_new_tokens >= 12)

    def forced(self, history):
        return None


class Forgetting(Ending):
    """The same, and what it says of a draft it says once: as a grammar that has come to a limit."""

    def __init__(self):
        self._full = False

    def banned(self, history):
        if self._full and history.length > history.num_committed:
            raise OptionError("the grammar cannot be applied to this text")
        self._full |= history.num_new_tokens >= 12
        return super().banned(history)


@pytest.mark.parametrize("constraint", [Ending, Forgetting])
@pytest.mark.parametrize("exact", [False, True])
def test_a_text_without_allowed_tokens_ends_as_in_plain_decoding(exact, constraint):
    """It was an error before tokens that were accepted already, where these were near-ties."""
    for seed in range(10):
        found = []
        for k in (0, 4):
            sampling = Sampling(constraint=constraint())
            rounds = decoder(seed, k, exact, share=1.0)[0].rounds(PROMPTS[seed], sampling, 0, 30)
            tokens = []
            with pytest.raises(OptionError):
                tokens.extend(token for one in rounds for token in one.tokens)
            found.append(tokens)
        assert len(found[0]) == len(found[1]) == 12
        assert found[0] == found[1] or not exact


class Tiring:
    """Options that say nothing of drafts after a while, as a grammar that they bring to a limit."""

    def __init__(self, num_left):
        self._num_left = num_left

    def banned(self, history):
        self._num_left -= history.length > history.num_committed
        if self._num_left < 0 and history.length > history.num_committed:
            raise OptionError("the grammar is not followed along drafts here")
        return np.zeros(7, bool)

    def forced(self, history):
        return None


def test_exact_text_equals_plain_decoding_if_a_grammar_skips_drafts():
    """Between the two looks at a near-tie it was an error, and a row that was no plain one's."""
    for seed in (3, 4):
        plain = generate(seed, 0, exact=True, share=1.0)[0][:30]
        for num_left in range(0, 40, 3):
            sampling = Sampling(constraint=Tiring(num_left))
            rounds = decoder(seed, 4, True, share=1.0)[0].rounds(PROMPTS[seed], sampling, 0, 30)
            assert [token for one in rounds for token in one.tokens][:30] == plain


def test_exact_processes_each_token_at_most_twice():
    _, _, target = generate(3, 4, exact=True, share=0.02)
    assert target.passes.count(1) <= LENGTH
    without = generate(3, 4, share=0.02)[2]
    assert sum(t > 1 for t in target.passes) <= 1.2 * len(without.passes)


def test_exact_runs_no_extra_passes_without_near_ties():
    distribution = hashed_distribution(3, 7, 2.0)

    def passes(exact):
        target = NoisyModel(distribution, 1e-9)
        drafter = DraftModel(TableModel(distribution))
        resolver = NearTieResolver(target, 2e-9, exact)
        decoder = SpeculativeDecoder(target, FixedPlan(drafter, 4), Stopwatch(), resolver)
        assert not [r for r in decoder.rounds((0, 1), Sampling(), 0, 100) if r.near_ties]
        return target.passes

    assert passes(True) == passes(False) == [5] * 20


def test_noise_above_the_measurement_is_an_error():
    with pytest.raises(SpecEdgeError, match=r"differs from plain decoding.*noise"):
        [generate(seed, 4, exact=True, bound=BOUND / 20) for seed in range(NUM_TEXTS)]


def test_noise_is_measured_over_consecutive_passes():
    distribution = hashed_distribution(1, 6)
    text = np.random.default_rng(0).integers(0, 6, 40).tolist()
    found = measure_noise(NoisyModel(distribution, NOISE), text, (2, 5), 16)
    assert all(NOISE < x <= BOUND for x in found.by_length.values())
    assert measure_noise(TableModel(distribution), text, (2, 5), 16).by_length == {2: 0.0, 5: 0.0}


def test_noise_measurement_includes_cache_noise():
    class NoisyCache(NoisyModel):
        """The first multi-token pass is exact, but its cache rows are not."""

        def forward(self, tokens):
            start = self.length
            logits = TableModel.forward(self, tokens).array()
            self.widths[start:] = [len(tokens)] * len(tokens)
            logits[:, 0] += self.noise * any(width > 1 for width in self.widths[:start])
            return Logits(logits)

    text = np.random.default_rng(0).integers(0, 6, 40).tolist()
    found = measure_noise(NoisyCache(hashed_distribution(1, 6), NOISE), text, (2, 16), 16)
    assert found.by_length[2] == pytest.approx(NOISE)
    assert found.by_length[16] == 0.0
