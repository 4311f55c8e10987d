import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specedge.errors import SpecEdgeError
from specedge.options import Sampling
from specedge.runtime.distribution import Distribution, pick
from specedge.runtime.laws import probabilities
from specedge.runtime.past import Past
from specedge.runtime.sampling import Draft, draw, verify

NOTHING = Past([0])


def logits_of(*probs):
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs, float))


def law(logits, sampling):
    """The whole row of probabilities."""
    return probabilities(logits, sampling, NOTHING).row(len(logits))


def drafted(*probs):
    return Distribution(np.array(probs, float))


def test_greedy_takes_the_lowest_id_on_ties():
    assert draw(np.array([1.0, 3.0, 3.0]), Sampling(), NOTHING, 0.9) == (1, None)


def test_temperature_divides_the_logits():
    logits = np.array([0.0, 1.0, 2.0])
    expected = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
    np.testing.assert_allclose(law(logits, Sampling(0.5)), expected, rtol=1e-12)


def test_a_tiny_temperature_is_one_hot_not_a_number_error():
    for temperature in (1e-30, 1e-44, 1e-300):
        probs = law(np.array([1.0, 5.0, 3.0], np.float32), Sampling(temperature))
        assert probs.tolist() == [0, 1, 0]


def test_top_k_keeps_every_tie_with_the_kth():
    probs = law(logits_of(0.1, 0.4, 0.25, 0.25), Sampling(1.0, top_k=2))
    np.testing.assert_allclose(probs, np.array([0, 0.4, 0.25, 0.25]) / 0.9)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, [1]), (0.41, [1, 2]), (0.7, [1, 2]), (0.71, [0, 1, 2]), (0.99, None)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    whole = np.array([0.2, 0.4, 0.3, 0.1])
    probs = law(logits_of(*whole), Sampling(1.0, top_p=top_p))
    assert np.flatnonzero(probs).tolist() == ([0, 1, 2, 3] if kept is None else kept)
    np.testing.assert_allclose(probs[probs > 0], (whole / whole[probs > 0].sum())[probs > 0])


def test_min_p_is_a_share_of_the_likeliest():
    probs = law(logits_of(0.5, 0.3, 0.15, 0.05), Sampling(1.0, min_p=0.4))
    np.testing.assert_allclose(probs, [0.625, 0.375, 0, 0])


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.1, 5),
    st.integers(0, 60),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_filters_agree_with_transformers(seed, temperature, top_k, top_p, min_p):
    torch = pytest.importorskip("torch", reason="needs the export extra")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(seed).normal(0, 3, 50)
    scores = torch.tensor(logits)[None]
    warpers = [process.TemperatureLogitsWarper(temperature)]
    warpers += [process.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [process.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [process.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(None, scores)
    ours = law(logits, Sampling(temperature, top_k, top_p, min_p))
    np.testing.assert_allclose(ours, scores.softmax(-1)[0].numpy(), rtol=1e-9, atol=1e-12)


def by_sorting(logits, sampling):
    """The rules spelled out over whole rows."""
    scaled = (logits - logits.max()) / logits.dtype.type(sampling.temperature)
    if 0 < sampling.top_k < len(logits):
        scaled[logits < np.sort(logits)[-sampling.top_k]] = -np.inf
    probs = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-probs, kind="stable")
    if sampling.top_p < 1:
        probs[order[np.cumsum(probs[order], dtype=float) - probs[order] >= sampling.top_p]] = 0
    probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("size", [3, 63, 64, 65, 6400, 6463])
@pytest.mark.parametrize("kind", ["random", "ties", "infinities"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, top_k=50),
        Sampling(0.7, top_k=99, top_p=0.9),
        Sampling(1.3, top_k=2000, min_p=0.01),
        Sampling(1.0, top_p=0.95),
        Sampling(1.0, top_p=0.3),
        Sampling(1.0, top_k=1),
    ],
)
def test_looking_at_blocks_first_changes_nothing(size, kind, sampling):
    random = np.random.default_rng(size)
    logits = random.normal(0, 3, size).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "infinities":
        logits[random.permutation(size)[: size - 2]] = -np.inf
    found, expected = law(logits, sampling), by_sorting(logits, sampling)
    assert np.array_equal(np.flatnonzero(found), np.flatnonzero(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    cdf = np.cumsum(found, dtype=np.float64)
    for uniform in random.random(50):
        assert pick(found, uniform) == np.searchsorted(cdf, uniform * cdf[-1], side="right")


def test_a_filtered_row_knows_every_token_and_draws_those_it_kept():
    filtered = probabilities(logits_of(0.1, 0.4, 0.2, 0.3), Sampling(1.0, top_k=2), NOTHING)
    assert len(filtered.probs) == 2
    assert [filtered.of(token) for token in range(4)] == filtered.row(4).tolist()
    assert filtered.of(1) == pytest.approx(4 / 7)
    assert [filtered.pick(u) for u in (0.0, 0.57, 0.58, 0.99)] == [1, 1, 3, 3]


@pytest.mark.parametrize("place", [0, 63, 64, 127, 128, 200])
def test_pick_finds_the_only_token_in_any_block(place):
    weights = np.zeros(201)
    weights[place] = 0.3
    assert {pick(weights, u) for u in (0.0, 0.5, float(np.nextafter(1, 0)))} == {place}


def test_pick_never_draws_a_token_without_weight():
    weights = np.array([0, 0.25, 0, 0.75, 0])
    drawn = {pick(weights, u) for u in (0.0, 0.2499, 0.25, 0.5, np.nextafter(1, 0))}
    assert drawn == {1, 3}


def test_pick_survives_a_product_that_rounds_up_to_the_total():
    weights = np.array([1e-320, 1e-320, 0])  # subnormal: times the largest uniform is the total
    assert pick(weights, float(np.nextafter(1, 0))) == 1


TARGET, DRAFT = (0.1, 0.6, 0.3), (0.5, 0.3, 0.2)


def output_law(target, draft, sampling):
    """The law of a round's first token, integrated exactly over its uniforms on a grid.

    Accepting x has probability min(1, t/d); what remains is spread as the residual picks.
    """
    first = np.zeros(len(target))
    grid = (np.arange(3000) + 0.5) / 3000
    rows = np.stack([logits_of(*target)] * 2)
    guess = probabilities(logits_of(*draft), sampling, NOTHING)
    for x, d in enumerate(guess.row(len(draft))):
        if d == 0:
            continue
        proposal = Draft([x], [guess])
        accepted = np.array(
            [verify(proposal, rows, sampling, NOTHING, [u], 0.5).num_accepted for u in grid]
        )
        first[x] += d * accepted.mean()
        if not accepted.all():
            u = grid[~accepted.astype(bool)][0]
            tokens = [verify(proposal, rows, sampling, NOTHING, [u], v).next_token for v in grid]
            share = np.bincount(tokens, minlength=len(target)) / 3000
            first += d * (1 - accepted.mean()) * share
    return first


@pytest.mark.parametrize("draft", [DRAFT, TARGET, (1, 0, 0), (0, 0, 1), (0.9, 0.05, 0.05)])
def test_the_accept_rule_gives_the_targets_law_for_any_draft(draft):
    np.testing.assert_allclose(output_law(TARGET, draft, Sampling(1.0)), TARGET, atol=4e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.6),
        Sampling(1.0, top_k=2),
        Sampling(0.9, top_k=3),  # the draft below has no more
        Sampling(1.0, top_p=0.7),
        Sampling(1.2, top_k=4, top_p=0.9, min_p=0.3),
    ],
)
@pytest.mark.parametrize("draft", [(0.6, 0.3, 0.1), (0.05, 0.05, 0.9), (1,)])
@pytest.mark.parametrize("target", [(0.1, 0.25, 0.15, 0.2, 0.3), (0.4, 0.3, 0.1, 0.15, 0.05)])
def test_a_draft_that_knows_fewer_tokens_leaves_the_targets_law(target, draft, sampling):
    expected = law(logits_of(*target), sampling)
    np.testing.assert_allclose(output_law(target, draft, sampling), expected, atol=6e-4)


@pytest.mark.parametrize(
    ("lenience", "expected"),
    [
        (1.0, (0.1, 0.6, 0.3)),
        (0.5, (0.2, 0.525, 0.275)),
        (0.3, (1 / 3, 0.425, 0.725 / 3)),
        (0.1, DRAFT),
    ],
)
def test_lenience_has_exactly_the_law_of_the_papers_appendix(lenience, expected):
    """min(d, t/b) + (1 - sum min(d, t/b)) / (1 - sum min(d, t)) max(0, t - d)."""
    found = output_law(TARGET, DRAFT, Sampling(1.0, lenience=lenience))
    np.testing.assert_allclose(found, expected, atol=4e-4)


def test_lenience_1_changes_no_bit_and_at_temperature_0_none_does():
    rows = np.stack([logits_of(*TARGET)] * 2)
    guess = Draft([0], [drafted(*DRAFT)])
    for u in np.random.default_rng(0).random(200):
        lenient = verify(guess, rows, Sampling(1.0, lenience=1.0), NOTHING, [u], u)
        assert lenient == verify(guess, rows, Sampling(1.0), NOTHING, [u], u)
    for token in range(3):
        lenient = verify(Draft([token]), rows, Sampling(lenience=0.01), NOTHING, [0.0], 0.0)
        assert lenient == verify(Draft([token]), rows, Sampling(), NOTHING, [0.0], 0.0)


def test_acceptance_rate_is_the_overlap_of_the_two_laws():
    grid = (np.arange(3000) + 0.5) / 3000
    rows = np.stack([logits_of(*TARGET)] * 2)
    rate = sum(
        d
        * verify(Draft([x], [drafted(*DRAFT)]), rows, Sampling(1.0), NOTHING, [u], 0.5).num_accepted
        for x, d in enumerate(DRAFT)
        for u in grid
    ) / len(grid)
    assert rate == pytest.approx(sum(map(min, TARGET, DRAFT)), abs=4e-4)


def test_a_token_that_the_target_never_gives_is_not_accepted_even_by_zero():
    rows = np.stack([logits_of(0, 1)] * 2)
    for guess in (drafted(1, 0), drafted(0, 1)):  # drafted with certainty, and never
        assert verify(Draft([0], [guess]), rows, Sampling(1.0), NOTHING, [0.0], 0.5) == (
            verify(Draft([0]), rows, Sampling(1.0), NOTHING, [0.0], 0.5)
        )
        verdict = verify(Draft([0], [guess]), rows, Sampling(1.0), NOTHING, [0.0], 0.5)
        assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_a_token_without_probability_in_either_law_is_not_accepted():
    """0 / 0 is no number, and min(1, nan) is 1."""
    rows = np.stack([logits_of(0, 1)] * 2)
    verdict = verify(Draft([0], [drafted(0, 1)]), rows, Sampling(1.0), NOTHING, [0.5], 0.5)
    assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_a_residual_that_rounds_to_nothing_falls_back_to_the_target():
    """The draft's law is the target's times a number, and u as large as can be."""
    largest, found = float(np.nextafter(1, 0)), 0
    for seed in range(50):
        random = np.random.default_rng(seed)
        logits = random.normal(size=3)
        target = probabilities(logits, Sampling(1.0), NOTHING)
        guess = Distribution(target.weights * random.uniform(0.1, 9))
        for token in range(3):
            if largest * guess.of(token) >= target.of(token):
                draft, rows = Draft([token], [guess]), np.stack([logits] * 2)
                verdict = verify(draft, rows, Sampling(1.0), NOTHING, [largest], 0.9)
                assert (verdict.num_accepted, verdict.next_token) == (0, target.pick(0.9))
                found += 1
    assert found > 5


def test_nothing_after_a_rejection_counts():
    rows = np.stack([logits_of(0, 1), logits_of(1, 0), logits_of(1, 0)])
    verdict = verify(
        Draft([0, 0], [drafted(1, 0)] * 2), rows, Sampling(1.0), NOTHING, [0.0, 0.0], 0.5
    )
    assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_the_bonus_token_follows_the_last_row_unadjusted():
    rows = np.stack([logits_of(1, 0), logits_of(0, 1)])
    verdict = verify(Draft([0], [drafted(1, 0)]), rows, Sampling(1.0), NOTHING, [0.9], 0.0)
    assert (verdict.num_accepted, verdict.next_token) == (1, 1)


@given(st.lists(st.integers(0, 3), min_size=0, max_size=4), st.integers(0, 1000))
def test_greedy_verification_is_the_accept_rule_at_temperature_zero(tokens, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3, (len(tokens) + 1, 4)).astype(float)  # ties on purpose
    choices = [int(np.argmax(row)) for row in rows]
    agreed = next((i for i, t in enumerate(tokens) if t != choices[i]), len(tokens))
    verdict = verify(Draft(tokens), rows, Sampling(), NOTHING, rng.random(4), 0.5)
    assert (verdict.num_accepted, verdict.next_token) == (agreed, choices[agreed])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)])
def test_logits_that_are_not_numbers_are_an_error(sampling):
    with pytest.raises(SpecEdgeError, match="not numbers"):
        draw(np.array([0.0, np.nan, 1.0]), sampling, NOTHING, 0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 2},
    ],
)
def test_impossible_options_are_refused_when_built(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sampling(**options)
