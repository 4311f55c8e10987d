import pytest

from specedge.runtime.theory import expected_tokens, speedup


@pytest.mark.parametrize(
    ("alpha", "k", "tokens"),
    [(0.8, 4, 3.3616), (0.5, 10, 1.999023), (0.9, 7, 5.695328), (1, 4, 5), (0, 4, 1), (0.7, 0, 1)],
)
def test_expected_tokens_are_the_papers(alpha, k, tokens):
    assert expected_tokens(alpha, k) == pytest.approx(tokens, abs=1e-6)


@pytest.mark.parametrize(
    ("alpha", "k", "cost", "factor"),
    [(0.8, 5, 0.12766, 2.2519), (0.75, 7, 0.02, 3.1575), (0.71, 3, 0.11, 1.9338)],
)
def test_with_free_verification_the_speedup_is_theorem_3_8(alpha, k, cost, factor):
    assert speedup(alpha, k, cost) == pytest.approx(factor, abs=1e-4)


def test_verifying_and_the_host_cost_too():
    assert speedup(0.8, 4, 0.1, 1.5, 0.1) == pytest.approx(3.3616 / 2.0)


def test_an_impossible_rate_is_refused():
    with pytest.raises(ValueError, match="alpha"):
        expected_tokens(1.1, 4)
