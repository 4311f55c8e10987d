"""Prompt lookup: what it copies, and that finding it costs nothing that grows with the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specedge.runtime.drafters.prompt_lookup import Index, Lookup
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling


def copied(text, max_tokens=4, **lengths):
    return propose(Lookup(**lengths), text, max_tokens)


def propose(lookup, text, max_tokens=4):
    draft = lookup.propose(History(text), max_tokens, Sampling(), np.zeros(0))
    assert draft.probs is None
    return draft.tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the latest of equals
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [3, 9, 8, 1]),  # the longest before the latest
        ([1, 2, 3, 1, 2], [3, 1, 2]),  # not sure to repeat: the copy ends with the text
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),  # repeated before: it goes on
        ([5, 5, 5], [5, 5, 5, 5]),
        ([5, 5], []),
        ([1, 2, 3, 4], []),
        ([1], []),
        ([1, 2, 3, 2], []),  # one token is no match
    ],
)
def test_what_is_copied(text, expected):
    assert copied(text) == expected


def test_the_lengths_of_a_match_are_options():
    text = [7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2]
    assert copied(text, min_match=1, max_match=2) == [4, 9, 7, 1]
    assert copied(text, min_match=3, max_match=3) == [3, 9, 8, 1]
    assert copied(text, min_match=4) == []
    assert copied([1, 2, 3, 2], min_match=1) == [3, 2]
    assert copied(list(range(9)) * 2, min_match=8) == [0, 1, 2, 3]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3)])
def test_lengths_that_cannot_be_are_refused(shortest, longest):
    with pytest.raises(ValueError, match="lookup_min must be between 1 and lookup_max"):
        Lookup(shortest, longest)


def test_fewer_tokens_are_the_beginning_of_more():
    for text in ([1, 2, 3, 1, 2], [1, 2, 3, 1, 2, 3], [5, 5, 5]):
        most = copied(text, 9)
        assert all(copied(text, n) == most[:n] for n in range(9))


def scanned(text, shortest, longest):
    """The same by looking at every earlier place."""
    best = (0, None)
    for place in range(1, len(text)):
        n = 0
        while n < min(place, longest) and text[place - 1 - n] == text[-1 - n]:
            n += 1
        if n >= max(shortest, best[0]):
            best = (n, place)
    return best[1]


@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_the_index_finds_what_a_scan_finds_however_the_text_comes_and_goes(data, shortest, more):
    index, text = Index(shortest, shortest + more), []
    for _ in range(data.draw(st.integers(1, 6))):
        length = data.draw(st.integers(0, len(text)) if data.draw(st.booleans()) else st.just(999))
        del text[length:]
        index.truncate(length)
        new = data.draw(st.lists(st.integers(0, 2), max_size=12))
        text += new
        index.extend(new)
        assert index.length == len(text)
        assert index.find() == scanned(text, shortest, shortest + more)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 30))
def test_what_is_taken_back_leaves_nothing_behind(tokens, length):
    index, fresh = Index(1, 4), Index(1, 4)
    index.extend(tokens)
    index.truncate(length)
    fresh.extend(tokens[:length])
    assert vars(index) == vars(fresh)


class CountedText(list):
    """A list that counts the elements that are read."""

    read = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found


@pytest.mark.parametrize("repeats", [False, True])
def test_a_round_reads_as_much_of_a_long_text_as_of_a_short_one(repeats):
    """Its own new tokens once, for each match length, and the copy."""
    k, lookup, history = 4, Lookup(2, 5), History([])
    rng = np.random.default_rng(0)
    history._kept = CountedText()
    lookup._index.tokens = CountedText()
    reads = []
    for _ in range(600):
        new = [1, 2, 3] if repeats else rng.integers(0, 50, 3).tolist()
        history.extend(new)
        before = history.tokens.read + lookup._index.tokens.read
        propose_past(lookup, history, k)
        reads.append(history.tokens.read + lookup._index.tokens.read - before)
    assert len(history.tokens) == 1800
    runs = 2 + 3 + 4 + 5
    assert min(reads) > 0
    assert max(reads) <= 3 + (3 + 1) * runs + 4 * k


def propose_past(lookup, history, k):
    return lookup.propose(history, k, Sampling(), np.zeros(0)).tokens


def test_another_text_begins_with_nothing_known():
    lookup = Lookup()
    assert propose(lookup, [1, 2, 3, 4, 1, 2])
    lookup.truncate(0)
    assert propose(lookup, [1, 2]) == []


def test_tokens_that_were_drafted_may_be_looked_at_and_taken_back():
    """A lookup that goes on where another drafter stopped sees tokens that may be rejected."""
    lookup, fresh = Lookup(), Lookup()
    propose(lookup, [1, 2, 3, 1, 2, 4, 1])
    lookup.truncate(5)
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    assert propose(lookup, text) == propose(fresh, text)
