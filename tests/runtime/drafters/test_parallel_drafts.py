"""Draft models that draft all tokens of a round in one pass over mask tokens."""

from dataclasses import replace

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import (
    FILTERED,
    NoisyModel,
    Sure,
    TableModel,
    decoder,
    filtered,
    generate,
    hashed_distribution,
)
from manifests import make_model
from specedge.runtime.decoding.timing import Stopwatch, TimedModel
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_head import create_drafter
from specedge.runtime.drafters.draft_model import DraftModel, ParallelDraftModel
from specedge.runtime.drafters.suffix import Suffix, SuffixBeforeModel
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

MASK = 9
EVERY_K = pytest.mark.parametrize("k", [1, 2, 3, 4])


def drafter_of(model, **limits):
    return ParallelDraftModel(model, mask_token=MASK, **limits)


DRAFTERS = {
    "model": lambda: drafter_of(TableModel(filtered(4)[0])),
    "chain": lambda: Chain(
        Suffix(min_match=1, max_match=3), drafter_of(TableModel(filtered(4)[0]))
    ),
    "after a sure token": lambda: Chain(Sure(), drafter_of(TableModel(filtered(4)[0]))),
    "a short context": lambda: drafter_of(
        TableModel(filtered(4)[0], context_length=4), context_length=4
    ),
}
EVERY_DRAFTER = pytest.mark.parametrize("name", DRAFTERS)


@pytest.mark.slow(after_first=True)
@EVERY_DRAFTER
@EVERY_K
def test_every_string_has_exactly_the_joint_probability_of_filtered_sampling(name, k, monkeypatch):
    distribution, rest = filtered(2)
    found = joint_distribution(
        lambda: decoder(distribution, DRAFTERS[name](), k), monkeypatch, (0, 1, 0), FILTERED
    )
    assert found == distribution_of_strings(rest, (0, 1, 0))


def test_enumeration_covers_draws_that_differ_from_the_targets():
    draft = drafter_of(TableModel(filtered(4)[0])).propose(
        History((0, 1, 0)), 4, FILTERED, np.full(4, 0.3)
    )
    target = filtered(2)[1]
    pairs = [(d.row(3), target((0, 1, 0, *draft.tokens[:i]))) for i, d in enumerate(draft.probs)]
    assert len(pairs) == 4
    assert any(not np.allclose(drawn_from, row) for drawn_from, row in pairs)
    assert any(0 < drawn_from.max() < 1 for drawn_from, _ in pairs)


@EVERY_DRAFTER
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_greedy_output_equals_the_target_alone(name, k):
    distribution, text = hashed_distribution(1, 3), (0, 1, 0)
    for _ in range(40):
        text += (int(np.argmax(distribution(text))),)
    assert generate(distribution, DRAFTERS[name](), k, Sampling(), 0, 40)[0] == list(text[3:])


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_round_takes_one_pass_over_unread_tokens_and_masks(k):
    model = TableModel(hashed_distribution(4, 3))
    one = decoder(hashed_distribution(1, 3), drafter_of(model), k)
    unread = 3
    for round_ in one.rounds((0, 1, 0), Sampling(1.0), 3, 60):
        assert model.passes == [unread + k - 1]
        unread = len(round_.tokens)
        model.passes.clear()


def check_cache(drafter):
    """Assert that a cache has the tokens of the text only, after a draft and in later rounds."""
    text = [i % 3 for i in range(12)]
    model = drafter.model
    for length in (5, 6, 9, 12):
        drafter.propose(History(text[:length]), 4, Sampling(1.0), np.full(4, 0.3))
        assert model.rows[: model.length] == text[:length]
        drafter.truncate(length - 1)


class KeepingMasks(TableModel):
    """Model whose drafter forgets to roll back the rows of mask tokens."""

    def truncate(self, length):
        if MASK not in self.rows[length : self.length]:
            super().truncate(length)


def test_rows_of_mask_tokens_are_rolled_back():
    check_cache(drafter_of(TableModel(hashed_distribution(4, 3))))


def test_rows_of_mask_tokens_left_in_the_cache_are_noticed():
    with pytest.raises(AssertionError):
        check_cache(drafter_of(KeepingMasks(hashed_distribution(4, 3))))


def test_later_tokens_are_drafted_from_the_text_and_masks_alone():
    distribution = hashed_distribution(4, 3)
    drafter = drafter_of(TableModel(distribution))
    for uniform in (0.1, 0.5, 0.9):
        drafter.truncate(0)
        draft = drafter.propose(History((0, 1, 0)), 3, Sampling(1.0), np.full(3, uniform))
        for i, drawn_from in enumerate(draft.probs):
            np.testing.assert_allclose(
                drawn_from.row(3), distribution((0, 1, 0, *[MASK] * i)), rtol=1e-6
            )


def test_penalties_count_the_drafted_tokens():
    sampling = Sampling(presence_penalty=2.0)
    model = drafter_of(TableModel(lambda text: (0.5, 0.3, 0.2)))
    draft = model.propose(History((0,), (0,)), 3, sampling, np.zeros(3))
    assert draft.tokens == [1, 2, 0]


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shorter_request_is_a_prefix_if_logits_depend_on_the_pass_length(chained, temperature):
    def run(count):
        drafter = drafter_of(NoisyModel(hashed_distribution(4, 3), 0.5))
        drafter = Chain(SuffixBeforeModel(Suffix()), drafter) if chained else drafter
        return generate(hashed_distribution(1, 3), drafter, 4, Sampling(temperature), 9, count)[0]

    longest = run(30)
    assert all(run(count) == longest[:count] for count in range(1, 30))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_pass_length_does_not_depend_on_the_requests_end(max_tokens):
    model = TableModel(hashed_distribution(4, 3))
    draft = drafter_of(model).propose(History((0, 1)), max_tokens, Sampling(), np.zeros(4))
    assert len(draft.tokens) == max_tokens
    assert model.passes == [2 + 3]


def test_a_mask_token_outside_the_vocabulary_is_read():
    model = TableModel(hashed_distribution(4, 3), vocab_size=MASK + 1)
    drafter_of(model, vocab_size=3).propose(History((0, 5)), 3, Sampling(), np.zeros(3))
    assert model.rows == [0, 0, MASK, MASK]


def test_a_long_text_is_prefilled():
    model = TableModel(hashed_distribution(4, 3))
    drafter = drafter_of(model)
    drafter.propose(History([0] * (drafter.max_unread + 1)), 4, Sampling(), np.zeros(4))
    assert model.passes == [1 + 3]
    drafter.propose(History([0] * (2 * drafter.max_unread)), 4, Sampling(), np.zeros(4))
    assert model.passes == [1 + 3, drafter.max_unread - 1 + 3]


@pytest.mark.parametrize("k", [1, 4, 8])
def test_passes_fit_into_the_context(k):
    model = TableModel(hashed_distribution(4, 3), context_length=9)
    tokens, rounds = generate(
        hashed_distribution(1, 3), drafter_of(model, context_length=9), k, Sampling(1.0), 1, 60
    )
    assert len(tokens) == 60
    assert all(round_.num_drafted for round_ in rounds[:-1])


def test_a_chain_lets_the_model_add_all_tokens_in_one_pass():
    model = TableModel(hashed_distribution(4, 3))
    chain = Chain(Sure(), drafter_of(model))
    history = History((0, 1, 0))
    copied = Sure().propose(history, 5, Sampling(), np.zeros(5)).tokens
    draft = chain.propose(history, 5, Sampling(), np.zeros(5))
    assert list(draft.sources) == ["sure"] * len(copied) + ["model"] * (5 - len(copied))
    assert copied
    assert model.passes == [history.length + 5 - 1]


def test_passes_of_a_draft_do_not_count_as_prefill_time():
    watch = Stopwatch()
    model = TimedModel(TableModel(hashed_distribution(4, 3)), watch, "draft")
    drafter_of(model).propose(History((0, 1)), 4, Sampling(), np.zeros(4))
    assert watch.seconds["draft"] > 0
    assert not watch.seconds["prefill"]


def test_a_manifest_with_a_mask_token_has_a_parallel_draft():
    entry = make_model("draft")
    model = TableModel(hashed_distribution(4, 3))
    assert type(create_drafter(model, entry)) is DraftModel
    drafter = create_drafter(model, replace(entry, mask_token=MASK))
    assert isinstance(drafter, ParallelDraftModel)
    assert (drafter.mask_token, drafter.context_length) == (MASK, entry.context_length)
