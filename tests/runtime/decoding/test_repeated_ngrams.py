"""Speculative texts without repeated n-grams have exactly the target's probabilities."""

import functools

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import TableModel
from specedge.runtime.decoding import decoding
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.planning.plans import FixedPlan
from specedge.sampling_options import Sampling

HISTORY = decoding.History


def banned_after(text, size):
    return {
        text[i + size - 1]
        for i in range(len(text) - size + 1)
        if text[i : i + size - 1] == text[len(text) - size + 1 :]
    }


def halves(seed, size, begins, is_edited):
    """Two equally likely tokens of three, at least one of which is not banned.

    So the distribution without banned tokens, `is_edited`, has halves as well.
    """

    @functools.cache
    def distribution(text):
        random = np.random.default_rng([seed, *text])
        banned = banned_after(text, size) | ({begins} if len(text) == 1 else set())
        allowed = [token for token in range(3) if token not in banned] or [0]  # impossible text
        first = allowed[random.integers(len(allowed))]
        second = (first + 1 + random.integers(2)) % 3
        row = np.zeros(3)
        row[[first, second]] = 0.5
        if is_edited and second in banned:
            row[[first, second]] = 1, 0
        return row

    return distribution


class WithOptions:
    """Decoder whose requests have other sampling options."""

    def __init__(self, decoder, **options):
        self._decoder, self._options = decoder, options

    def rounds(self, prompt, sampling, seed, count):
        sampling = Sampling(sampling.temperature, **self._options)
        return self._decoder.rounds(prompt, sampling, seed, count)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [2, 1, 3])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_string_has_exactly_the_probability_without_repetitions(k, seed, monkeypatch):
    prompt, begins, size = (1,), 2, 2
    monkeypatch.setattr(decoding, "History", lambda tokens, **_: HISTORY(tokens[:1], tokens[1:]))

    def make():
        target, draft = (TableModel(halves(seed + i, size, begins, False)) for i in (0, 10))
        decoder = SpeculativeDecoder(target, FixedPlan(DraftModel(draft), k), Stopwatch())
        return WithOptions(decoder, no_repeat_ngram_size=size, begin_suppress_tokens=(begins,))

    target = halves(seed, size, begins, True)
    found = joint_distribution(make, monkeypatch, prompt)
    assert found == distribution_of_strings(target, prompt)
    assert len(found) > 2
    assert any(banned_after(text[:i], size) for text in found for i in range(2, len(text)))
