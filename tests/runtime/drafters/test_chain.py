"""A chain: each drafter goes on where the one before it has nothing more."""

import numpy as np

from fakes import Sure, TableModel, generate, hashed_distribution, quarters
from specedge import Draft
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.requests.stats import compute_stats
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling


class Copier(Drafter):
    """Drafter of the tokens after the latest earlier match of the last two."""

    name = "suffix"

    def propose(self, history, max_tokens, sampling, uniforms):
        text = history.tokens
        starts = [i for i in range(2, len(text)) if text[i - 2 : i] == text[-2:]]
        return Draft(text[starts[-1] :][:max_tokens] if starts else [])


def test_model_drafts_only_tokens_after_the_copy():
    draft = TableModel(hashed_distribution(4, 3))
    chain = Chain(Copier(), DraftModel(draft))
    history = History((0, 1, 2, 0, 1))
    made = chain.propose(history, 5, Sampling(), np.zeros(5))
    assert made.tokens[:3] == [2, 0, 1]
    assert list(made.sources[:4]) == ["suffix"] * 3 + ["model"]
    assert draft.rows[:8] == [*history.tokens, 2, 0, 1]
    assert draft.passes == [1] * list(made.sources).count("model")
    chain.truncate(4)
    draft.passes.clear()
    assert chain.propose(history, 3, Sampling(), np.zeros(3)).tokens == [2, 0, 1]
    assert not draft.passes  # the copy filled it
    last = chain.propose(History((0, 1, 2, 0, 1, 1)), 1, Sampling(), np.zeros(1))
    assert list(last.sources) == ["model"]


def test_chain_copies_again_after_model_tokens_create_a_match():
    def distribution(text):
        return np.eye(8)[(text[-1] + 1) % 8]

    draft = TableModel(distribution)
    chain = Chain(Copier(), DraftModel(draft))
    history = History((0, 1, 2, 7, 6, 5, 1))
    made = chain.propose(history, 7, Sampling(), np.zeros(7))
    assert made.tokens == [2, 7, 6, 5, 1, 2, 3]
    assert list(made.sources) == ["model"] + ["suffix"] * 5 + ["model"]
    assert len(draft.passes) == 2
    chain.truncate(6)
    again = chain.propose(history, 7, Sampling(), np.zeros(7))
    assert again.tokens == made.tokens


def test_a_chain_ends_with_its_last_drafter():
    class Silent(Sure):
        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft([])

    made = Chain(Sure(), Silent()).propose(History((0, 1, 2)), 4, Sampling(), np.zeros(4))
    assert made.tokens == [1]


def test_rounds_record_the_source_of_each_token():
    _, rounds = generate(
        hashed_distribution(1, 3),
        Chain(Sure(), DraftModel(TableModel(quarters(4, False)))),
        3,
        Sampling(1.0),
        1,
        40,
    )
    start = 3
    for one in rounds:
        places = range(start, start + one.num_drafted)
        assert one.sources == tuple("model" if at % 3 else "sure" for at in places)
        start += len(one.tokens)
    stats = compute_stats(rounds, 3, Stopwatch().seconds)
    for name in ("drafted", "tested", "accepted"):
        whole = getattr(stats, f"num_{name}")
        assert sum(getattr(stats, f"{name}_by_source").values()) == whole
    sure = [
        i < one.num_accepted
        for one in rounds
        for i, name in enumerate(one.sources)
        if name == "sure" and i <= one.num_accepted
    ]
    assert 0 < sum(sure) < len(sure) == stats.tested_by_source["sure"]
    assert sum(sure) == stats.accepted_by_source["sure"]
