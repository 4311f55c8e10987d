"""Calls of multi-step draft graphs on devices that run no pass of a single token."""

import pytest

from specedge.runtime.backend.buffers import HostBuffers
from specedge.runtime.backend.cuda.draft_graphs import GreedyDraftGraph
from specedge.runtime.backend.kv_cache import KeyValueCache


class RecordedSession:
    """Session that records the tokens of each pass."""

    min_length = 2

    def __init__(self):
        self.tokens = []

    def bind(self, cache, *args, **options):
        return cache

    def run(self, bound, tokens, inputs=None):
        self.tokens.append((bound.length, [*tokens]))
        bound.extend(tokens)


@pytest.mark.parametrize(
    ("cached", "new", "expected"),
    [
        ([], [5], (0, [5])),  # attention reads a single row
        ([3, 4], [5], (1, [4, 5])),
        ([3, 4], [5, 6], (2, [5, 6])),
    ],
)
def test_single_token_is_read_after_the_one_before(cached, new, expected):
    session, cache = RecordedSession(), KeyValueCache({}, HostBuffers())
    cache.extend(cached)
    GreedyDraftGraph(session, cache)._run(new)
    assert session.tokens == [expected]
    assert cache.length == len(cached) + len(new)
