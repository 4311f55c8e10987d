"""Our distribution of the next token against transformers' processors, in its own order, row by
row.
"""

import numpy as np
import pytest
import torch
import transformers

from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Row
from specedge.runtime.sampling.logits_processors import process_logits
from specedge.runtime.sampling.probabilities import greedy_token, probabilities
from specedge.sampling_options import Sampling

VOCAB, PROMPT, LENGTH = 40, 5, 12
ENDS = (3, 8)
ROWS, SETTINGS = 2_500, 25


def rows_of(random, count):
    """Logits of every kind: plain, tied, flat, far apart, with infinities, all but one or two."""
    rows = random.normal(0, 3, (count, VOCAB))
    rows[1::7] = np.round(rows[1::7])
    rows[2::7] = random.normal(0, 1e-3, rows[2::7].shape)
    rows[3::7] *= 1000
    rows[4::7][random.random(rows[4::7].shape) < 0.5] = -np.inf
    rows[4::7, 20] = 1.0
    for i in range(5, count, 7):
        rows[i, random.permutation(VOCAB)[1 + i % 2 :]] = -np.inf
    rows[6::7] = random.integers(-3, 3, (len(rows[6::7]), 1))
    return rows


OPTIONS = {
    "temperature": lambda r: r.uniform(0.05, 5),
    "top_k": lambda r: int(r.integers(1, VOCAB + 5)),
    "top_p": lambda r: r.uniform(0.01, 0.999),
    "min_p": lambda r: r.uniform(0, 1),
    "typical_p": lambda r: r.uniform(0.01, 0.999),
    "repetition_penalty": lambda r: r.uniform(0.5, 2),
    "presence_penalty": lambda r: r.uniform(-2, 2),
    "frequency_penalty": lambda r: r.uniform(-2, 2),
    "logit_bias": lambda r: {int(t): r.uniform(-9, 9) for t in r.permutation(VOCAB)[:5]},
    "bad_words": lambda r: [
        *([int(t)] for t in r.permutation(VOCAB - 1)[:6]),
        *(r.integers(0, 5, r.integers(2, 4)).tolist() for _ in range(20)),
        [ENDS[0]],
        [0] * (LENGTH + 2),
    ],
    "min_new_tokens": lambda r: int(r.integers(1, 12)),
    "no_repeat_ngram_size": lambda r: int(r.integers(1, 6)),
    "suppress_tokens": lambda r: r.permutation(VOCAB)[:6].tolist(),
    "begin_suppress_tokens": lambda r: r.permutation(VOCAB)[:6].tolist(),
}
EDITS = (
    "NoBadWordsLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SuppressTokensLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
)  # fmt: skip


def processors(options):
    """transformers' own list, in the order in which `generate` builds it."""
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=4, n_layer=1, n_head=1)
    )
    names = ("bad_words", "logit_bias", "presence_penalty", "frequency_penalty")
    known = {name: value for name, value in options.items() if name not in names}
    config = transformers.GenerationConfig(
        do_sample=True, bad_words_ids=options.get("bad_words"), eos_token_id=list(ENDS),
        **{"top_k": 0, **known},
    )  # fmt: skip
    model._prepare_special_tokens(config)
    return model._get_logits_processor(generation_config=config, input_ids_seq_length=PROMPT)


def by_transformers(rows, texts, options):
    """Distributions, with OpenAI's two penalties and the bias after the repetition penalty."""
    scores, texts_ = torch.tensor(rows), torch.tensor(texts)
    waiting = [*processors(options)]
    if "repetition_penalty" in options:
        scores = waiting.pop(0)(texts_, scores)
    counts = torch.zeros(scores.shape, dtype=scores.dtype)
    counts.scatter_add_(1, texts_[:, PROMPT:], torch.ones(texts_[:, PROMPT:].shape).double())
    scores = scores - options.get("frequency_penalty", 0) * counts
    scores = scores - options.get("presence_penalty", 0) * (counts > 0).double()
    for token, bias in options.get("logit_bias", {}).items():
        scores[:, token] += bias
    edits = scores
    for processor in waiting:
        scores = processor(texts_, scores)
        if type(processor).__name__ in EDITS:
            edits = scores
    return edits.numpy(), scores.softmax(-1).numpy()


def check(options, random, count, length=LENGTH):
    rows, texts = rows_of(random, count), random.integers(0, 6, (count, length))
    texts[::2] = random.integers(0, VOCAB, texts[::2].shape)
    texts[1::4] = random.integers(0, 2, texts[1::4].shape)
    edits, distributions = by_transformers(rows, texts, options)
    sampling = Sampling(**{"temperature": 1.0, **options}, end_tokens=ENDS)
    before = rows.copy()
    for row, text, edit, expected in zip(rows, texts.tolist(), edits, distributions, strict=True):
        history = History(text[:PROMPT], text[PROMPT:9]).then(text[9:])
        np.testing.assert_allclose(process_logits(row, sampling, history), edit, rtol=1e-12)
        if not np.isfinite(edit.max()):  # the options leave nothing
            continue
        found = probabilities(row, sampling, history).row(VOCAB)
        np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-7, atol=1e-13)
        other = np.abs(found - expected) > 1e-7  # which of equals top-p keeps, torch leaves open
        assert len(set(edit[other])) <= 1
        assert greedy_token(Row(row), sampling, history) == int(np.argmax(edit))
    assert np.array_equal(rows, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_matches_transformers(name):
    random = np.random.default_rng(list(OPTIONS).index(name))
    for _ in range(SETTINGS):
        check({name: OPTIONS[name](random)}, random, ROWS // SETTINGS)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        *(("no_repeat_ngram_size", length) for length in (1, 2, PROMPT)),
        *(("begin_suppress_tokens", length) for length in (PROMPT, PROMPT + 1)),
    ],
)
def test_bans_of_short_texts_match_transformers(name, length):
    random = np.random.default_rng(length)
    for _ in range(5):
        check({name: OPTIONS[name](random)}, random, 40, length)


def test_option_combinations_match_transformers():
    random = np.random.default_rng(99)
    for _ in range(12):
        names = [name for name in OPTIONS if random.random() < 0.4]
        check({name: OPTIONS[name](random) for name in names}, random, 70)


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_cumulative_probability_equal_to_top_p_is_sufficient(top_p):
    """Sixteen equal tokens, whose sums are exact."""
    row = np.full((1, VOCAB), -np.inf)
    row[0, 4:20] = 2.0
    text = np.zeros((1, LENGTH), int)
    expected = by_transformers(row, text, {"top_p": top_p})[1][0]
    found = probabilities(row[0], Sampling(1.0, top_p=top_p), History([0])).row(VOCAB)
    assert np.array_equal(np.sort(found), np.sort(expected))
    assert np.count_nonzero(found) == 16 * top_p
