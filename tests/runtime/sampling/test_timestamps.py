"""Rules of timestamps against transformers' processor, and with speculation."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import WhisperTimeStampLogitsProcessor

from fakes import TableModel, hashed_distribution
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits_processors import process_logits
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling, TimestampRules

VOCAB, END, FIRST, MAX_INITIAL = 24, 9, 14, 4  # text to 8, control tokens to 13, then timestamps
RULES = TimestampRules(FIRST, END, MAX_INITIAL)
PROMPT = [10, 11]


def by_transformers(rows, texts):
    config = SimpleNamespace(
        no_timestamps_token_id=FIRST - 1, eos_token_id=END, bos_token_id=END,
        max_initial_timestamp_index=MAX_INITIAL,
    )  # fmt: skip
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT))
    return processor(torch.tensor(texts), torch.tensor(rows)).numpy()


def texts_of(random, length):
    """New tokens: of any kind, or in segments between timestamps."""
    any_tokens = random.integers(0, VOCAB, length).tolist()
    segments = [
        token
        for i in range(length)
        for token in (FIRST + i // 2, *random.integers(0, END, 2).tolist(), FIRST + i // 2)
    ]
    start = int(random.integers(0, 4))
    return [any_tokens, segments[:length], segments[start : start + length],
            [FIRST + 1, 3, FIRST + 2][:length] + segments[: max(0, length - 3)]]  # fmt: skip


@pytest.mark.parametrize("length", range(9))
def test_rules_are_transformers(length):
    random = np.random.default_rng(length)
    for _ in range(60):
        for text in texts_of(random, length):
            assert len(text) == length
            row = random.normal(0, 3, VOCAB)
            row[FIRST:] -= random.choice([0, 3, 6])
            (expected,) = by_transformers(row[None], [[*PROMPT, *text]])
            drafted = int(random.integers(0, length + 1))
            history = History(PROMPT, text[: length - drafted]).then(text[length - drafted :])
            actual = process_logits(row, Sampling(timestamps=RULES), history)
            np.testing.assert_array_equal(actual, expected)


def test_rows_of_fewer_tokens_have_the_same_rules():
    random = np.random.default_rng(0)
    ids = np.array([0, 2, 5, END, FIRST - 1, FIRST, FIRST + 1, FIRST + 5])
    for length in range(6):
        for text in texts_of(random, length):
            row = np.full(VOCAB, -np.inf)
            row[ids] = random.normal(0, 3, len(ids))
            sampling, history = Sampling(timestamps=RULES), History(PROMPT, text)
            whole = process_logits(row, sampling, history)
            np.testing.assert_array_equal(
                process_logits(row[ids], sampling, history, ids), whole[ids]
            )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_speculative_texts_equal_those_of_edited_distributions(k, temperature):
    """The rules see draft tokens as they see the text's own."""

    def edited(distribution):
        def edit(text):
            row = np.log(distribution(text))
            (masked,) = by_transformers(row[None], [list(text)])
            return np.exp(masked) / np.exp(masked).sum()

        return edit

    def generate(distributions, sampling, k, seed):
        target, draft = map(TableModel, distributions)
        plan = FixedPlan(DraftModel(draft), k)
        decoder = SpeculativeDecoder(target, plan, Stopwatch())
        rounds = list(decoder.rounds(tuple(PROMPT), sampling, seed, 16))
        return [token for round_ in rounds for token in round_.tokens][:16]

    plain = hashed_distribution(1, VOCAB, 2.0), hashed_distribution(2, VOCAB, 2.0)
    for seed in range(5):
        by_hand = generate([edited(d) for d in plain], Sampling(temperature), k, seed)
        sampling = Sampling(temperature, timestamps=RULES)
        assert generate(plain, sampling, k, seed) == by_hand
        assert any(token >= FIRST for token in by_hand)


def test_a_timestamp_follows_if_all_together_are_the_most_likely():
    row = np.zeros(VOCAB)
    row[3] = 1.0  # below the sum of the timestamps, above each of them
    history = History(PROMPT, [FIRST, 5])
    found = probabilities(row, Sampling(1.0, timestamps=RULES), history).row(VOCAB)
    assert found[:FIRST].sum() == 0
    assert found[FIRST] == 0
    row[3] = 9.0
    found = probabilities(row, Sampling(1.0, timestamps=RULES), history).row(VOCAB)
    assert found[3] > 0.9
