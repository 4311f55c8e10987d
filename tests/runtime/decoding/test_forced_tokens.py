"""Under a grammar: tokens that it forces are drafted without a model, banned ones not at all."""

import pytest

from fakes import TableModel, decoder, hashed_distribution
from grammars import END, constraint
from specedge import Draft
from specedge.errors import OptionError
from specedge.runtime.decoding.constrained_draft import GRAMMAR, propose
from specedge.runtime.decoding.protocols import Drafter, run_operations
from specedge.runtime.decoding.verification import DraftRequest
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel, ParallelDraftModel
from specedge.runtime.drafters.registry import RandomDrafter
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

PROMPT = (0, 1, 0)
FORCED = ("regex", "(abc){9}")
SOME = ("regex", "(abc(a|b|c)cba(ab|cc))+c")
DRAFTERS = {
    "model": lambda model: DraftModel(model),
    "suffix": lambda model: Suffix(),
    "chain": lambda model: Chain(Suffix(min_match=1, max_match=5), DraftModel(model)),
    "parallel": lambda model: ParallelDraftModel(model, mask_token=END),
    "random": lambda model: RandomDrafter(END + 1),
}


class Copied(Drafter):
    """Drafts the same tokens everywhere, without randomness, or as if they were drawn."""

    name = "copied"

    def __init__(self, tokens, drawn_from=None):
        self.tokens, self.drawn_from, self.num_asked, self.cuts = tokens, drawn_from, 0, []

    def propose(self, history, max_tokens, sampling, uniforms):
        self.num_asked += 1
        tokens = self.tokens[:max_tokens]
        return Draft(tokens, [self.drawn_from] * len(tokens) if self.drawn_from else None)

    def truncate(self, length):
        self.cuts.append(length)


def run(grammar, drafter, k, temperature=0.0, seed=0, count=24):
    """The rounds, and what was drafted in each."""
    target = hashed_distribution(seed, END + 1)
    loop = decoder(target, drafter, k)
    fed, forward = [], loop.target.forward
    loop.target.forward = lambda tokens, num_rows: (
        fed.append(list(tokens[1:])) or forward(tokens, num_rows)
    )
    sampling = Sampling(temperature, end_tokens=(END,), constraint=constraint(*grammar))
    return list(loop.rounds(PROMPT, sampling, seed, count)), fed


def drafted(drafter, grammar, most, temperature=0.0, new=()):
    sampling = Sampling(temperature, end_tokens=(END,), constraint=constraint(*grammar))
    request = DraftRequest(History(PROMPT, new), most, sampling, [0.5] * most)
    return run_operations(propose(drafter, request))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_forced_tokens_need_no_drafter_and_are_all_accepted(name, temperature):
    model = TableModel(hashed_distribution(1, END + 1))
    rounds, fed = run(FORCED, DRAFTERS[name](model), 4, temperature)
    assert model.passes == []
    assert [len(one.tokens) for one in rounds] == [5] * 4 + [4 + bool(temperature)]
    assert {source for one in rounds for source in one.sources} == {GRAMMAR}
    assert all(
        one.num_accepted == one.num_drafted == len(f) for one, f in zip(rounds, fed, strict=True)
    )


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_draft_model_processes_forced_tokens_before_drafting(k):
    """It is the target: so all that it drafts is accepted, if it read the text."""
    for seed in range(6):
        model = TableModel(hashed_distribution(seed, END + 1))
        rounds, _ = run(SOME, DraftModel(model), k, seed=seed, count=30)
        assert all(one.num_accepted == one.num_drafted for one in rounds)
        names = [name for one in rounds for name in one.sources]
        assert names.count("model") == len(model.passes) > 0 < names.count(GRAMMAR)


def test_smaller_vocabulary_draft_continues_after_forced_tokens():
    model = TableModel(hashed_distribution(1, 2), vocab_size=2)
    draft = drafted(DraftModel(model, vocab_size=2), ("regex", "abc(a|b)cc(a|b)"), 7)
    assert [t for t in draft.tokens if t > 1] == [2, 2, 2]
    assert list(draft.sources) == [GRAMMAR] * 3 + ["model"] + [GRAMMAR] * 2 + ["model"]


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_token_truncates_the_draft(name, k, temperature):
    for seed in range(4):
        model = TableModel(hashed_distribution(seed + 1, END + 1))
        rounds, fed = run(SOME, DRAFTERS[name](model), k, temperature, seed)
        fresh, new = constraint(*SOME), []
        for one, tokens in zip(rounds, fed, strict=True):
            banned = [bool(fresh.banned(History([], [*new, *tokens[:i]]))[tokens[i]])
                      for i in range(len(tokens))
                      if not any(fresh.banned(History([], [*new, *tokens[:j]]))[tokens[j]]
                                 for j in range(i))]  # fmt: skip
            drawn = temperature and name in ("random",)
            assert len(banned) == len(tokens)
            assert not any(banned[:-1] if drawn else banned)
            assert END not in tokens[:-1]
            new += one.tokens


def test_copies_end_at_banned_tokens_and_continue_after_forced_ones():
    copied = Copied([2, 1, 1, 0])
    draft = drafted(copied, ("regex", "(a|c)bcc(a|c)b"), 9)
    assert draft.tokens == [2, 1, 2, 2, 2, 1, END]
    assert list(draft.sources) == ["copied", *[GRAMMAR] * 3, "copied", GRAMMAR, GRAMMAR]
    assert copied.num_asked == 2


def test_truncated_draft_rolls_back_drafter_cache_before_next_proposal():
    """Otherwise a drafter with a cache would continue its draft instead of the text."""
    copied = Copied([2, 1, 1, 0])
    drafted(copied, ("regex", "(a|c)bcc(a|c)b"), 9)
    assert copied.cuts == [len(PROMPT) + 2, len(PROMPT) + 6]


def test_a_chain_stops_after_an_end_token():
    model = TableModel(hashed_distribution(1, END + 1))
    chain = Chain(Suffix(min_match=1, max_match=5), DraftModel(model))
    draft = drafted(chain, ("regex", "(a|b)c?"), 8, temperature=1.0)
    assert (draft.tokens[-1], len(model.passes)) == (END, [*draft.sources].count("model"))


def test_a_chain_continues_with_its_model_after_a_banned_copy():
    model = TableModel(hashed_distribution(1, END + 1))
    chain = Chain(Copied([2, 2, 2]), DraftModel(model))
    draft = drafted(chain, ("regex", "c(a|b)(a|b)(a|b)[abc]*"), 4)
    assert list(draft.sources) == [GRAMMAR, "model", "model", "model"]
    assert not {2} & {*draft.tokens[1:]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_grammar_dead_end_equals_plain_decoding(name, temperature):
    """A text may end with them: by its length, or a stop string."""
    for k in (0, 1, 2, 3, 4, 8):
        model, found = TableModel(hashed_distribution(1, END + 1)), []
        sampling = Sampling(
            temperature,
            end_tokens=(END,),
            min_new_tokens=9,
            constraint=constraint("regex", "abca"),
        )
        loop = decoder(hashed_distribution(0, END + 1), DRAFTERS[name](model), k)
        rounds = (found.extend(one.tokens) for one in loop.rounds(PROMPT, sampling, 0, 9))
        with pytest.raises(OptionError, match="leave no token"):
            list(rounds)
        assert found == [0, 1, 2, 0]


def test_a_smaller_limit_shortens_a_draft():
    for name in DRAFTERS:
        for temperature in (0.0, 1.0):
            made = [
                drafted(
                    DRAFTERS[name](TableModel(hashed_distribution(2, END + 1))),
                    SOME, most, temperature, (0, 1, 2),
                ).tokens
                for most in range(1, 9)
            ]  # fmt: skip
            assert made == [made[-1][: len(one)] for one in made]
            assert [len(one) for one in made] == [min(i, len(made[-1])) for i in range(1, 9)]
