"""Speculative decoding under grammars equals plain masked decoding."""

from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pytest

from exact import LENGTH, joint_distribution
from fakes import TableModel, decoder, hashed_distribution
from grammars import END, allowed_of, constraint, texts_of
from specedge import Draft
from specedge.bundle.manifest import MeasuredAcceptance
from specedge.runtime.decoding import decoding
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel, ParallelDraftModel
from specedge.runtime.drafters.registry import RandomDrafter
from specedge.runtime.drafters.suffix import Suffix
from specedge.sampling_options import Sampling

# Each ends within the three tokens that are looked at, in some texts, and in others does not.
WORDS = ["a", "ab", "abc", "ca", "cab", "bbb", "bca"]
LARK = 'start: "a" rest? | "c" "a" "b"? | "bbb" | "bca"\nrest: "b" "c"?'
# Free text, and after its first c a grammar: it begins inside a draft.
FREE = "[ab]*ca?b"
_FREE_TEXTS = texts_of(
    *("".join(letters) + end for n in range(6) for letters in product("ab", repeat=n)
      for end in ("cab", "cb"))
)  # fmt: skip
GRAMMARS = {
    "regex": ("regex", "|".join(WORDS), texts_of(*WORDS)),
    "lark": ("grammar", LARK, texts_of(*WORDS)),
    "begins inside": ("regex", FREE, _FREE_TEXTS),
}
# Weights in quarters by the number of allowed tokens, such that every threshold of a round is one.
TARGET_ROWS = {1: [(4,)], 2: [(1, 3), (3, 1), (2, 2), (4, 0)], 3: [(2, 1, 1), (0, 2, 2), (4, 0, 0)]}
# The same, of a draft that gives a token all weight: what is left of a row is no third.
HALVED_ROWS = {1: [(4,)], 2: [(1, 3), (3, 1), (2, 2)], 3: [(2, 2, 0), (0, 2, 2), (4, 0, 0)]}
DRAFT_ROWS = {1: [(4,)], 2: [(2, 2), (0, 4)], 3: [(2, 1, 1), (1, 1, 2), (2, 2, 0), (0, 2, 2)]}


def table(rows, texts, seed, num_prompt_tokens=1):
    """Quarters for the tokens that may follow a text, and much more weight for those that may
    not: whoever does not mask writes them.
    """

    def distribution(text):
        new = text[num_prompt_tokens:]
        allowed = allowed_of(texts, new)
        rng = np.random.default_rng([seed, len(text), *text])
        weights = rng.integers(4, 40, size=END + 1).astype(float)
        if allowed:
            found = rows[len(allowed)]
            weights[allowed] = found[rng.integers(len(found))]
        return weights

    return distribution


def expected(target, texts):
    """Return the distribution of plain masked decoding over the texts of the grammar."""
    found = {}
    for new in product(range(END + 1), repeat=LENGTH):
        probability = Fraction(1)
        for i in range(LENGTH):
            allowed = allowed_of(texts, new[:i])
            weights = target((0, *new[:i]))
            probability *= Fraction(int(weights[new[i]]) if new[i] in allowed else 0, 4)
            if not probability:
                break
        else:
            found[0, *new] = probability
    return found


class Under:
    """A decoder whose texts are all drawn under one constraint."""

    def __init__(self, decoder, constraint):
        self._decoder, self._constraint = decoder, constraint

    def rounds(self, prompt, sampling, seed, count):
        sampling = Sampling(sampling.temperature, end_tokens=(END,), constraint=self._constraint)
        return self._decoder.rounds(prompt, sampling, seed, count)


class Unmasked(Drafter):
    """Drafts tokens that no grammar was asked about."""

    name = "unmasked"

    def propose(self, history, max_tokens, sampling, uniforms):
        return Draft([(history.length + i) % (END + 1) for i in range(max_tokens)])


@pytest.fixture
def whole_prompts(monkeypatch):
    """Texts begin after one token of prompt, wherever the loop goes on with them."""
    monkeypatch.setattr(
        decoding, "History", lambda tokens, source: _HISTORY(tokens[:1], tokens[1:], source)
    )


_HISTORY = decoding.History


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(("k", "seed"), [(2, 1), (1, 2), (3, 3), (2, 4), (2, 5), (1, 6)])
def test_every_text_has_exact_masked_probability(name, k, seed, monkeypatch, whole_prompts):
    kind, text, texts = GRAMMARS[name]
    target, draft = table(TARGET_ROWS, texts, seed), table(DRAFT_ROWS, texts, seed + 50)
    shared = constraint(kind, text)  # one for all rounds: it goes back and on between texts

    def make():
        return Under(decoder(target, DraftModel(TableModel(draft)), k), shared)

    assert joint_distribution(make, monkeypatch) == expected(target, texts)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_drafts_in_one_pass_have_exact_masked_probability(k, monkeypatch, whole_prompts):
    """Their rows do not depend on the drafted tokens, of which the grammar allows two each."""
    words = ["".join(letters) for letters in product("ab", "ac", "bc")]
    texts, shared = texts_of(*words), constraint("regex", "(a|b)(a|c)(b|c)")
    target = table(TARGET_ROWS, texts, k)

    def make():
        draft = TableModel(lambda text: np.ones(END + 1))
        return Under(decoder(target, ParallelDraftModel(draft, mask_token=END), k), shared)

    assert joint_distribution(make, monkeypatch) == expected(target, texts)


@pytest.mark.parametrize(
    ("rows", "drafter", "seed", "name"),
    [
        *((HALVED_ROWS, Unmasked, 7, name) for name in GRAMMARS),
        (TARGET_ROWS, partial(RandomDrafter, END + 1), 8, "begins inside"),
    ],
)
def test_unmasked_drafts_preserve_masked_distribution(
    rows, drafter, seed, name, monkeypatch, whole_prompts
):
    """A banned token that was drawn must be tested: the recovered token is no draw from a row."""
    kind, text, texts = GRAMMARS[name]
    target, shared = table(rows, texts, seed), constraint(kind, text)

    def make():
        return Under(decoder(target, drafter(), 2), shared)

    assert joint_distribution(make, monkeypatch) == expected(target, texts)


class EndsEarly(DraftModel):
    def draft(self, request):
        return super().draft(replace(request, min_confidence=0.5))


def ends_early(model):
    rates = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    acceptance = MeasuredAcceptance(0.6, 0.6, rates, rates)
    return EndsEarly(model, acceptance=acceptance)


def continued(model):
    return Chain(Unmasked(), DraftModel(model))


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    ("make_drafter", "rows", "seed", "k"),
    [(ends_early, TARGET_ROWS, 3, 3), (continued, HALVED_ROWS, 9, 2)],
)
def test_drafts_of_varied_lengths_preserve_masked_distribution(
    make_drafter, rows, seed, k, name, monkeypatch, whole_prompts
):
    kind, text, texts = GRAMMARS[name]
    target, draft = table(rows, texts, seed), table(DRAFT_ROWS, texts, seed + 50)
    shared = constraint(kind, text)

    def make():
        return Under(decoder(target, make_drafter(TableModel(draft)), k), shared)

    assert joint_distribution(make, monkeypatch) == expected(target, texts)


DRAFTERS = {
    "model": lambda model: DraftModel(model),
    "parallel": lambda model: ParallelDraftModel(model, mask_token=END),
    "chain": lambda model: Chain(Suffix(min_match=1, max_match=5), DraftModel(model)),
    "random": lambda model: RandomDrafter(END + 1),
    "unmasked": lambda model: Unmasked(),
}
LONG = {
    "endless": ("regex", "(ab|ba|c(a|b){2})+c"),
    "ends": ("regex", "(ab){2,9}c?"),
    "recursive": ("grammar", 'start: "a" start "b" | "c"'),
}


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_follows_its_grammar_and_greedy_text_equals_plain_decoding(
    name, drafter, k, temperature
):
    kind, text = LONG[name]

    def run(k, seed):
        draft = DRAFTERS[drafter](TableModel(hashed_distribution(seed + 1, END + 1)))
        sampling = Sampling(temperature, end_tokens=(END,), constraint=constraint(kind, text))
        loop = decoder(hashed_distribution(seed, END + 1), draft, k)
        rounds = loop.rounds((0, 1, 0), sampling, seed, 24)
        return [token for one in rounds for token in one.tokens][:24]

    for seed in range(2):
        found = run(k, seed)
        fresh = constraint(kind, text)  # its masks, of one text read from its start to its end
        for i, token in enumerate(found):
            assert not fresh.banned(_HISTORY([], found[:i]))[token]
        if not temperature:
            assert found == run(0, seed)
