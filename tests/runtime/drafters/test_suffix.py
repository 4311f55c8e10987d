"""Suffix decoding: drafts, draft lengths and constant cost per token."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specedge import Draft
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.drafters import suffix
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.suffix import (
    DECAY,
    MIN_PROBABILITY,
    MIN_RATE,
    PRIOR_RATES,
    PRIOR_TESTS,
    EarlierOutputs,
    Suffix,
    SuffixBeforeModel,
)
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

LENGTHS = (16, 8, 4, 2, 1)


def propose(drafter, text, max_tokens=8, drafted=()):
    history = History(text)
    history = history.then(drafted) if drafted else history
    draft = drafter.propose(history, max_tokens, Sampling(), np.zeros(0))
    assert draft.probs is None
    return draft.tokens


def proposed(text, max_tokens=8):
    return propose(Suffix(), text, max_tokens)


def guess(counted, text):
    """By counting in `counted` all that followed the longest end of the text that something
    followed: the most frequent, the latest among equals; the run's length, and the share's class.
    """
    for length in LENGTHS:
        run = text[-length:]
        places = [i for i in range(length, len(counted)) if counted[i - length : i] == run]
        if len(run) == length and places:
            followers = [counted[i] for i in places]
            last = {token: i for i, token in enumerate(followers)}
            token = max(last, key=lambda one: (followers.count(one), last[one]))
            share = 4 * followers.count(token) // (len(followers) + 1)
            return token, (length, share)
    return None


def rates(texts):
    """Return decayed counts of accepted and tested guesses by class along a text."""
    right, tested = {}, {}
    for i in range(len(texts)):
        found = guess(texts[:i], texts[:i])
        if found is not None:
            token, kind = found
            right[kind] = DECAY * right.get(kind, prior(kind)) + (token == texts[i])
            tested[kind] = DECAY * tested.get(kind, PRIOR_TESTS) + 1
    return right, tested


def prior(kind):
    length, share = kind
    return PRIOR_TESTS * PRIOR_RATES[share] * (1 - 0.5**length)


def counted_out(text, max_tokens, drafted=(), before_model=False):
    """The same draft from counts that are made anew for each token."""
    right, tested = rates(text)
    draft, chance = [], 1.0
    while len(draft) < max_tokens:
        found = guess(text, [*text, *drafted, *draft])
        if found is None:
            break
        token, kind = found
        rate = right.get(kind, prior(kind)) / tested.get(kind, PRIOR_TESTS)
        chance *= rate
        if rate < MIN_RATE if before_model else chance < MIN_PROBABILITY:
            break
        draft.append(token)
    return draft


TEXTS = st.one_of(
    st.lists(st.integers(0, 1), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.builds(
        lambda part, times, end: part * times + part[:end],
        st.lists(st.integers(0, 5), min_size=1, max_size=20),
        st.integers(1, 4),
        st.integers(0, 20),
    ),
)


@pytest.mark.parametrize("before_model", [False, True])
@given(TEXTS, st.lists(st.integers(0, 3), max_size=6), st.integers(0, 20))
def test_draft_equals_brute_force_counting(before_model, text, drafted, max_tokens):
    drafter = SuffixBeforeModel(Suffix()) if before_model else Suffix()
    alone = propose(drafter, text, max_tokens)
    assert alone == counted_out(text, max_tokens, (), before_model)
    again = propose(drafter, text, max_tokens, drafted)
    assert again == counted_out(text, max_tokens, drafted, before_model)


@given(st.data())
def test_a_draft_depends_on_the_text_only(data):
    drafter, history = Suffix(), History(data.draw(st.lists(st.integers(0, 2), max_size=9)))
    for _ in range(data.draw(st.integers(1, 6))):
        drafted = data.draw(st.lists(st.integers(0, 2), max_size=4))
        drafter.propose(history.then(drafted), data.draw(st.integers(0, 5)), Sampling(), None)
        history.extend(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
        drafter.truncate(history.length - 1)
        assert propose(drafter, history.tokens) == proposed(history.tokens)


def test_suffix_decoding_continues_tokens_of_other_drafters():
    class Two(Drafter):
        name = "two"

        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft([2])

    text = [1, 2, 3, 4, 5] * 3 + [9]
    made = Chain(Suffix(), Two()).propose(History(text), 5, Sampling(), np.zeros(5))
    assert made.tokens[:3] == [2, 3, 4]
    assert list(made.sources[:3]) == ["two", "suffix", "suffix"]


@pytest.mark.parametrize("alphabet", [1, 3, 50000])
def test_a_token_adds_at_most_a_thousand_bytes(alphabet):
    tokens = np.random.default_rng(0).integers(0, alphabet, 4000).tolist()
    drafter = Suffix()
    tracemalloc.start()
    propose(drafter, tokens)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert used < 1000 * len(tokens)


class CountedRuns(dict):
    """A dict that counts how often it is asked."""

    asked = 0

    def get(self, *key):
        self.asked += 1
        return super().get(*key)


@pytest.mark.parametrize("alphabet", [1, 3, 50])
def test_steps_per_token_do_not_depend_on_text_length(alphabet):
    drafter, history = Suffix(), History([0])
    runs = drafter._readers[0]._index._runs = CountedRuns()
    rng, asked = np.random.default_rng(0), []
    for _ in range(600):
        history.extend(rng.integers(0, alphabet, 3).tolist())
        before = runs.asked
        drafter.propose(history, 4, Sampling(), None)
        asked.append(runs.asked - before)
    assert 0 < max(asked) <= (1 + 3 + 4) * 5


def test_continuations_in_earlier_outputs_are_drafted():
    earlier = EarlierOutputs()
    output = list(range(100, 140))
    drafter = Suffix(earlier)
    assert propose(drafter, [1, 2, *output[:9]]) == []
    earlier.add(output)
    drafter.truncate(0)
    assert propose(drafter, [1, 2, *output[:9]]) == output[9:17]
    assert propose(Suffix(), [1, 2, *output[:9]]) == []


def test_matches_do_not_span_outputs():
    earlier = EarlierOutputs()
    earlier.add([1, 2])
    earlier.add([3, 4])
    assert propose(Suffix(earlier), [2]) == []
    assert propose(Suffix(earlier), [3], 1) == [4]


OUTPUTS = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=4)


@given(OUTPUTS, st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_followers_in_earlier_outputs_equal_brute_force_counting(outputs, text):
    earlier = EarlierOutputs()
    for output in outputs:
        earlier.add(output)
    index = earlier.indexes[0]
    runs = index.find(text[-16:])
    separated = [token for output in outputs for token in (*output, None)]
    for level, length in enumerate(reversed(LENGTHS)):
        run = text[-length:]
        ends = [i for i in range(length, len(separated)) if separated[i - length : i] == run]
        followers = [separated[i] for i in ends if separated[i] is not None]
        best = index.follower(runs, range(level, level + 1))
        if len(run) < length or not followers:
            assert best is None
        else:
            count = max(map(followers.count, followers))
            assert followers.count(best[0]) == count
            assert best[1] == 4 * level + 4 * count // (len(followers) + 1)


def test_the_source_with_the_best_rate_is_drafted_from():
    """The text goes on otherwise than the outputs after each of its tokens, twice over."""
    earlier, part = EarlierOutputs(), list(range(30))
    earlier.add(part[::-1])
    text = [*part, *part, *part[:5]]
    assert propose(Suffix(earlier), text, 3) == [5, 6, 7]
    right = EarlierOutputs()
    right.add(part)
    assert propose(Suffix(right), part[:9], 3) == [9, 10, 11]


def test_the_latest_outputs_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_REMEMBERED", 40)
    earlier, outputs = EarlierOutputs(), [[10 * i + j for j in range(8)] for i in range(20)]
    for i, output in enumerate(outputs):
        earlier.add(output)
        kept = sum(index.num_tokens for index in earlier.indexes)
        assert min(8 * (i + 1), 20) - 8 <= kept <= 40
        assert propose(Suffix(earlier), output[:4], 1) == output[4:5]
    assert propose(Suffix(earlier), outputs[0][:4], 1) == []
    earlier.add(list(range(500, 600)))
    assert sum(index.num_tokens for index in earlier.indexes) <= 40
    assert propose(Suffix(earlier), [590, 591], 1) == [592]
    assert propose(Suffix(earlier), [510, 511], 1) == []


@pytest.mark.parametrize(
    ("min_match", "max_match", "expected"),
    [(1, 16, 5), (1, 1, 7), (1, 3, 5), (2, 2, 5), (4, 5, None), (3, 64, 5)],
)
def test_match_lengths_restrict_the_matches_to_draft_from(min_match, max_match, expected):
    text = [1, 2, 5, 9, 2, 7, 8, 2, 7, 4, 1, 2]  # 5 followed 1 2, 7 followed 2 twice
    draft = propose(Suffix(min_match=min_match, max_match=max_match), text)
    assert (draft[0] if draft else None) == expected


def test_match_lengths_out_of_order_are_refused():
    with pytest.raises(ValueError, match="between 1 and lookup_max, got 3 and 2"):
        Suffix(min_match=3, max_match=2)
