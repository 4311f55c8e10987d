"""How often a draft token is accepted by two distributions, and what lenience makes of the
distribution.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specedge.runtime.decoding.verification import Draft, verify
from specedge.runtime.sampling.distribution import Distribution
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.sampling_options import Sampling
from specedge.theory.overlap import (
    acceptance_probability,
    acceptance_rate,
    lenient_distribution,
    rejection_sampling_acceptance,
    total_variation,
)

TARGET, DRAFT = (0.1, 0.6, 0.3), (0.5, 0.3, 0.2)


def distributions(size):
    weights = arrays(np.float64, size, elements=st.sampled_from([0, 0.1, 1, 2, 5, 1e-9]))
    return weights.filter(lambda row: row.sum() > 0).map(lambda row: row / row.sum())


@pytest.mark.parametrize(
    ("lenience", "accepted", "out"),
    [
        (1, 0.6, (0.1, 0.6, 0.3)),
        (0.5, 0.7, (0.2, 0.525, 0.275)),
        (0.3, 0.833333, (0.333333, 0.425, 0.241667)),
        (0.1, 1.0, (0.5, 0.3, 0.2)),
        (2, 0.3, (0.05, 0.675, 0.275)),
    ],
)
def test_lenience_bends_the_distribution_towards_the_draft_and_strictness_away(
    lenience, accepted, out
):
    assert acceptance_probability(TARGET, DRAFT, lenience) == pytest.approx(accepted, abs=1e-6)
    distribution = lenient_distribution(TARGET, DRAFT, lenience)
    assert distribution == pytest.approx(out, abs=1e-6)
    assert distribution != pytest.approx(
        (0.14, 0.54, 0.32), abs=1e-2
    )  # drawing again from the target


@pytest.mark.parametrize(
    ("lenience", "distance"), [(1, 0), (0.5, 0.1), (0.3, 0.233333), (0.1, 0.4)]
)
def test_how_far_the_lenient_distribution_is_from_the_targets(lenience, distance):
    distribution = lenient_distribution(TARGET, DRAFT, lenience)
    assert total_variation(distribution, TARGET) == pytest.approx(distance, abs=1e-6)


@given(distributions(4), distributions(4), st.sampled_from([0.05, 0.3, 0.8, 1, 1.5, 4]))
def test_the_lenient_distribution_is_a_distribution_and_bounded(target, draft, lenience):
    distribution = lenient_distribution(target, draft, lenience)
    assert distribution.min() >= 0
    assert distribution.sum() == pytest.approx(1)
    if lenience <= 1:
        assert (distribution <= target / lenience + 1e-9).all()
    if lenience == 1:
        assert distribution == pytest.approx(target)


@given(st.integers(0, 2), st.integers(0, 2), st.floats(0.01, 5))
def test_at_temperature_0_lenience_changes_nothing(target, draft, lenience):
    rows = np.eye(3)
    assert lenient_distribution(rows[target], rows[draft], lenience) == pytest.approx(rows[target])


def test_the_lenient_distribution_is_what_the_accept_rule_gives_with_lenient_uniforms():
    # Uniforms of [0, b] instead of [0, 1], on a grid of midpoints, through the runtime's own rule.
    size = 60
    grid = (np.arange(size) + 0.5) / size
    with np.errstate(divide="ignore"):
        scores = Logits(np.log(np.array([TARGET, TARGET])))
    for lenience in (0.5, 1, 2):
        out = np.zeros(3)
        for token, drafted in enumerate(DRAFT):
            draft = Draft([token], [Distribution(np.array(DRAFT))])
            for test in lenience * grid:
                for last in grid[::5]:
                    verdict = verify(draft, scores, Sampling(1.0), History([0]), [test], last)
                    first = token if verdict.num_accepted else verdict.next_token
                    out[first] += drafted / (size * len(grid[::5]))
        assert out == pytest.approx(lenient_distribution(TARGET, DRAFT, lenience), abs=0.02)


@given(distributions(5), distributions(5))
def test_a_draft_token_is_accepted_as_often_as_the_distributions_overlap(target, draft):
    overlap = acceptance_probability(target, draft)
    assert overlap == pytest.approx(np.minimum(target, draft).sum())
    assert overlap == pytest.approx(1 - total_variation(target, draft))


@given(distributions(5), distributions(5))
def test_plain_rejection_sampling_accepts_no_more_often(target, draft):
    plain = rejection_sampling_acceptance(target, draft)
    assert plain <= acceptance_probability(target, draft) + 1e-12


def test_plain_rejection_sampling_accepts_one_in_the_largest_ratio():
    assert rejection_sampling_acceptance(TARGET, DRAFT) == pytest.approx(1 / 2)
    assert rejection_sampling_acceptance((0.5, 0.5), (1, 0)) == 0
    assert rejection_sampling_acceptance((1, 0), (0.5, 0.5)) == 0.5


def test_alpha_is_the_mean_over_positions():
    rows = [TARGET, DRAFT, (1, 0, 0)], [DRAFT, DRAFT, (0, 1, 0)]
    assert acceptance_rate(*rows) == pytest.approx((0.6 + 1 + 0) / 3)


def test_a_uniform_draft_is_accepted_as_far_as_the_target_is_flat():
    uniform = np.full(4, 0.25)
    assert acceptance_probability((0.7, 0.2, 0.1, 0), uniform) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: acceptance_probability((0.5, 0.6), (0.5, 0.5)), "target_probs must sum to 1"),
        (lambda: acceptance_probability((0.5, 0.5), (1.5, -0.5)), "draft_probs must be prob"),
        (lambda: acceptance_probability((0.5, 0.5), (np.nan, 1)), "draft_probs must be prob"),
        (lambda: acceptance_probability([[1.0]], [[1.0]]), r"target_probs must be prob.* \[V\]"),
        (lambda: total_variation((1, 0), (1,)), "draft_probs has 1 tokens, target_probs 2"),
        (
            lambda: lenient_distribution(TARGET, DRAFT, 0),
            "lenience must be above 0 and finite, got 0",
        ),
        (lambda: acceptance_rate([TARGET], [DRAFT, DRAFT]), "as many rows"),
        (lambda: acceptance_rate([], []), "at least one row"),
    ],
)
def test_what_is_no_distribution_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
