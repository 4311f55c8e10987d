"""Penalties, biases and banned tokens, with and without speculation."""

import dataclasses
import functools

import numpy as np
import pytest

from fakes import TableModel, hashed_distribution
from specedge.errors import OptionError, SpecEdgeError
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import draw
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Row
from specedge.runtime.sampling.logits_processors import process_logits
from specedge.runtime.sampling.probabilities import greedy_token, probabilities
from specedge.sampling_options import Sampling

EDITS = Sampling(
    repetition_penalty=1.7,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias={0: -1, 2: 0.7},
    bad_words=[[4], [0, 1], [2, 3, 2]],
    min_new_tokens=6,
    end_tokens=(5,),
    no_repeat_ngram_size=3,
    suppress_tokens=(7,),
    begin_suppress_tokens=(3, 8),
)


def test_penalties_count_exactly_the_tokens_before_a_position():
    history = History([1, 2], [3, 3])
    for drafted, expected in (
        ([], {1: 0, 2: 0, 3: 2}),
        ([4], {1: 0, 2: 0, 3: 2, 4: 1}),
        ([4, 4, 1], {1: 1, 2: 0, 3: 2, 4: 2}),
    ):
        ids, counts = history.then(drafted).counts()
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected
    history.extend([4])
    ids, counts = history.counts()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {1: 0, 2: 0, 3: 2, 4: 1}


def test_incremental_counts_equal_counts_of_the_whole_text():
    tokens = np.random.default_rng(0).integers(0, 300, 2000).tolist()
    history = History(tokens[:50])
    for i in range(50, 2000, 7):
        history.counts()
        history.then([1, 2, 1]).counts()
        history.extend(tokens[i : i + 7])
        whole = History(tokens[:50], tokens[50 : i + 7])
        assert all(
            np.array_equal(a, b) for a, b in zip(history.counts(), whole.counts(), strict=True)
        )


@pytest.mark.parametrize("count", range(6))
def test_the_last_tokens_are_those_of_the_whole_text(count):
    history = History([1, 2], [3])
    for drafted in ([], [4], [4, 5]):
        whole = [1, 2, 3, *drafted]
        assert history.then(drafted).last(count) == whole[max(0, len(whole) - count) :]


def test_processors_do_not_modify_model_logits():
    logits = np.random.default_rng(0).normal(size=6).astype(np.float32)
    logits.flags.writeable = False
    for sampling in (EDITS, Sampling(), Sampling(1.0, top_p=0.5), Sampling(1.0, min_p=0.1)):
        assert process_logits(logits, sampling, History([1, 0])).dtype == np.float32
        draw(Row(logits), sampling, History([1, 0]), 0.5)


def test_temperature_0_picks_most_likely_allowed_token():
    row = Row(np.array([0.0, 3.0, 3.0, 2.0]))
    assert greedy_token(row, Sampling(bad_words=[[1]]), History([0])) == 2
    assert greedy_token(row, Sampling(logit_bias={3: 1}), History([0])) == 1
    assert greedy_token(row, Sampling(repetition_penalty=2.0), History([1])) == 2
    assert greedy_token(row, Sampling(presence_penalty=2.0), History([1, 2], [1])) == 2
    assert greedy_token(row, Sampling(min_new_tokens=1, end_tokens=(1, 2)), History([0])) == 3
    assert greedy_token(row, Sampling(min_new_tokens=1, end_tokens=(1, 2)), History([0], [0])) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_ban_every_token_are_named_in_the_error(temperature):
    for edits in ({"bad_words": [[0], [1]]}, {"min_new_tokens": 1, "end_tokens": (0, 1)}):
        with pytest.raises(OptionError, match=r"bad_words.*min_new_tokens.*leave no token"):
            draw(Row(np.zeros(2)), Sampling(temperature, **edits), History([0]), 0.5)
    with pytest.raises(SpecEdgeError, match="not numbers"):
        draw(Row(np.full(2, -np.inf)), Sampling(temperature, bad_words=[[0]]), History([0]), 0.5)


@pytest.mark.parametrize("penalty", [1e-300, 1e-50, 1e39, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_extreme_penalties_are_supported(penalty, temperature):
    """A tiny divisor turns small logits into the largest finite ones."""
    logits = np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    sampling = Sampling(temperature, repetition_penalty=penalty)
    if temperature:
        row = probabilities(logits, sampling, History([0, 1])).row(4)
        assert np.isfinite(row).all()
        assert row.sum() == pytest.approx(1)
    else:
        assert greedy_token(Row(logits), sampling, History([0, 1])) == (0 if penalty < 1 else 3)


def test_option_tokens_outside_model_vocabulary_are_ignored():
    few = np.random.default_rng(0).normal(size=3)
    history, many = History([1, 2, 4], [5, 2, 0]), np.append(few, [1.0, 2.0, 3.0])
    assert np.array_equal(
        process_logits(few, EDITS, history), process_logits(many, EDITS, history)[:3]
    )


def generate(sampling, k, seed, draft_vocab=6):
    return generate_of(
        hashed_distribution(1, 6),
        hashed_distribution(2, draft_vocab),
        sampling,
        k,
        seed,
        draft_vocab,
    )


def generate_of(
    target_distribution, draft_distribution, sampling, k, seed, draft_vocab=6, count=30
):
    drafter = DraftModel(TableModel(draft_distribution, draft_vocab), vocab_size=draft_vocab)
    one = SpeculativeDecoder(TableModel(target_distribution), FixedPlan(drafter, k), Stopwatch())
    rounds = list(one.rounds((0, 1), sampling, seed, count))
    return [token for round_ in rounds for token in round_.tokens][:count]


def test_speculative_text_equals_plain_text_under_every_edit():
    plain = generate(EDITS, 0, 0)
    assert plain != generate(Sampling(), 0, 0)
    assert 4 not in plain
    assert 5 not in plain[:6]
    for k in (1, 2, 4, 8):
        for draft_vocab in (6, 3, 1):
            assert generate(EDITS, k, 0, draft_vocab) == plain


def test_a_draft_without_allowed_tokens_is_empty():
    forbidden = Sampling(bad_words=[[0], [1]])
    assert generate(forbidden, 4, 0, draft_vocab=2) == generate(forbidden, 0, 0)


def by_hand(distribution, prompt_length=2):
    """A distribution with EDITS put into it, spelled out over whole texts."""

    @functools.cache
    def edited_distribution(text):
        logits, new = np.log(distribution(text)), text[prompt_length:]
        for token in range(6):
            if token in text:
                logits[token] *= 1.7 if logits[token] < 0 else 1 / 1.7
            logits[token] -= 0.3 * new.count(token) + 0.5 * (token in new)
        logits += [-1, 0, 0.7, 0, 0, 0]
        logits[4] = -np.inf
        for word in ((0, 1), (2, 3, 2)):
            if text[-len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -np.inf
        if len(new) < 6:
            logits[5] = -np.inf
        if not new:
            logits[3] = -np.inf
        for i in range(len(text) - 2):
            if text[i : i + 2] == text[-2:]:
                logits[text[i + 2]] = -np.inf
        return np.exp(logits) / np.exp(logits).sum()

    return edited_distribution


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edits_equal_edited_distributions(k, temperature):
    distributions = hashed_distribution(1, 6), hashed_distribution(2, 6)
    models = [distributions, tuple(map(by_hand, distributions))]
    samplings = [dataclasses.replace(EDITS, temperature=temperature), Sampling(temperature)]
    for seed in range(6):
        found, expected = (
            generate_of(*pair, sampling, k, seed)
            for pair, sampling in zip(models, samplings, strict=True)
        )
        assert found == expected
