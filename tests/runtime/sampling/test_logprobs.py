"""Log-probabilities of emitted tokens: the softmax of the target's own logits."""

import math

import numpy as np
import pytest

from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.logprobs import TokenLogprobs, token_logprobs

PROMPT = "def read_config(path):"


def test_logprobs_equal_log_softmax():
    logits = np.random.default_rng(0).normal(0, 3, (2, 500)).astype(np.float32)
    exact = logits.astype(float) - np.log(np.exp(logits.astype(float)).sum(1, keepdims=True))
    given = token_logprobs(Logits(logits), [7, 499], 5)
    for row, token, found in zip(exact, (7, 499), given, strict=True):
        assert found.token == token
        assert found.logprob == pytest.approx(row[token], abs=1e-6)
        order = np.argsort(-row, kind="stable")[:5].tolist()
        assert [token for token, _ in found.top] == order
        assert [p for _, p in found.top] == pytest.approx(row[order].tolist(), abs=1e-6)


def test_top_logprobs_are_ordered_by_id_on_ties():
    row = Logits(np.log(np.array([[1, 1, 2, 1, 1, 2]]) / 8))
    assert [t for t, _ in token_logprobs(row, [0], 4)[0].top] == [2, 5, 0, 1]
    one = Logits(np.array([[-np.inf, 3.0, -np.inf]]))
    assert token_logprobs(one, [1], 9) == [TokenLogprobs(1, 0.0, [(1, 0.0)])]
    assert token_logprobs(row, [2], 0) == [TokenLogprobs(2, math.log(2 / 8), [])]
    assert token_logprobs(row, [2], None) is None


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_logprobs_equal_plain_decoding_bitwise(pipeline, k):
    options = {"logprobs": 3, "repetition_penalty": 1.1, "ignore_eos": True}
    plain = pipeline.generate(PROMPT, 60, num_draft_tokens=0, **options)
    found = pipeline.generate(PROMPT, 60, num_draft_tokens=k, **options)
    assert found.logprobs == plain.logprobs
    assert [one.token for one in found.logprobs] == found.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_each_emitted_token_has_logprobs(pipeline, temperature):
    made = pipeline.generate(PROMPT, 61, temperature, seed=2, stop="\n\n", logprobs=0)
    assert [one.token for one in made.logprobs] == made.tokens
    prompt = pipeline.tokenizer.encode(PROMPT).ids
    pipeline.target.truncate(0)
    pipeline.target.prefill(prompt[:-1])
    for before, one in zip([prompt[-1], *made.tokens], made.logprobs, strict=False):
        assert token_logprobs(pipeline.target.forward([before]), [one.token], 0) == [one]
    assert pipeline.generate(PROMPT, 5).logprobs is None
