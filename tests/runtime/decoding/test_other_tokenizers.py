"""Drafts with another tokenizer: a token of the text is one or several of the draft model's."""

import functools

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import TableModel, hashed_distribution
from grammars import END, constraint
from specedge.bundle.token_readings import TokenReadings
from specedge.runtime.decoding import verification
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.probabilities import row_distribution
from specedge.sampling_options import Sampling

IDS = (0, 1, 2, 4)  # tokens of the text that the draft has, too
SHARED = {0: 5, 1: 2, 2: 4, 4: 0}  # its tokens
READINGS = TokenReadings.from_lists([[5], [2], [4], [3, 1, 3], [0], [1, 1]], [6, 3])
NUM_TOKENS, NUM_DRAFT_TOKENS = 6, 7
EVERY_K = pytest.mark.parametrize("k", range(1, 9))
TEMPERATURE, TOP_P = 0.7, 0.8


class OtherTokens(TableModel):
    """A table over the draft's tokens, whose rows have the columns of `IDS`."""

    def __init__(self, distribution, temperature=1.0, **sizes):
        super().__init__(distribution, NUM_DRAFT_TOKENS, **sizes)
        self.temperature = temperature

    def forward(self, tokens, num_rows=None):
        logits = super().forward(tokens, num_rows).array()
        return Logits(self.temperature * logits, np.array(IDS))


class AtTemperature(TableModel):
    """A table whose distributions are those of a temperature."""

    def __init__(self, distribution, temperature):
        super().__init__(distribution)
        self.temperature = temperature

    def forward(self, tokens, num_rows=None):
        return Logits(self.temperature * super().forward(tokens, num_rows).array())


def like(distribution, noise=0.3):
    """The target's distribution of shared tokens after a text of the draft's, and some noise."""
    token_of = {reading: token for token, reading in SHARED.items()}
    other = hashed_distribution(9, len(IDS))

    def draft(text):
        tokens, at = [], len(READINGS.prefix)
        while at < len(text):
            for token, reading in ((3, (3, 1, 3)), (5, (1, 1))):
                if text[at : at + len(reading)] == reading:
                    tokens.append(token)
                    at += len(reading)
                    break
            else:
                tokens.append(token_of.get(text[at], 0))
                at += 1
        weights = (1 - noise) * distribution(tuple(tokens))[[*IDS]] + noise * other(text)
        return weights / weights.sum()

    return draft


DRAFTERS = {
    "model": lambda model: DraftModel(model, readings=READINGS),
    "chain": lambda model: Chain(
        Suffix(min_match=1, max_match=2), DraftModel(model, readings=READINGS)
    ),
}
EVERY_DRAFTER = pytest.mark.parametrize("name", DRAFTERS)


def run(target, drafter, k, sampling=Sampling(), seed=7, count=60, prompt=(5, 0, 3, 1)):  # noqa: B008
    decoder = SpeculativeDecoder(TableModel(target), FixedPlan(drafter, k), Stopwatch())
    rounds = list(decoder.rounds(prompt, sampling, seed, count))
    return [token for one in rounds for token in one.tokens][:count], rounds


def test_first_token_of_text_is_read_with_the_prefix():
    assert READINGS.read([3, 0, 5]) == [6, 3, 3, 1, 3, 5, 1, 1]
    assert READINGS.read([0, 5], start=1) == [5, 1, 1]
    begins = TokenReadings.from_lists([[6, 3, 2], [2]], [6, 3])
    assert begins.read([0, 1]) == [6, 3, 2, 2]
    assert READINGS.longest == 5


def test_file_has_the_readings():
    found = TokenReadings.unpack(READINGS.pack(), NUM_TOKENS, READINGS.prefix)
    assert [[*found.of(token)] for token in range(NUM_TOKENS)] == [
        [*READINGS.of(token)] for token in range(NUM_TOKENS)
    ]
    assert len(READINGS.pack()) == 4 * (7 + 9)
    for data in (READINGS.pack()[:-4], READINGS.pack()[:8], bytes(4 * 7)):
        with pytest.raises(ValueError, match="reading"):
            TokenReadings.unpack(data, NUM_TOKENS)


# Weights of tokens 0 to 3 in quarters, of the target and the draft (0 to 2), such that every
# threshold is one, too. Token 4 has the rest, and is outside the nucleus.
TARGET_ROWS = [(1, 1, 1, 1), (1, 1, 0, 2), (2, 1, 0, 1), (1, 2, 1, 0), (0, 2, 1, 1), (2, 1, 1, 0)]
DRAFT_ROWS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


def quarters_and_rest(rows, seed, num_tokens):
    @functools.cache
    def distribution(text):
        row = rows[np.random.default_rng([seed, len(text), *text]).integers(len(rows))]
        weights = np.zeros(num_tokens)
        weights[: len(row)] = 0.22 * np.array(row)
        weights[-1 if num_tokens == len(IDS) else 4] = 0.12
        return weights

    return distribution


def joint_of_two(name, k, monkeypatch):
    """The joint distribution of two tokens, and that of the target."""
    target = quarters_and_rest(TARGET_ROWS, 1, NUM_TOKENS)
    draft = quarters_and_rest(DRAFT_ROWS, 2, len(IDS))

    def make():
        drafter = DRAFTERS[name](OtherTokens(draft, TEMPERATURE))
        model = AtTemperature(target, TEMPERATURE)
        return SpeculativeDecoder(model, FixedPlan(drafter, k), Stopwatch())

    def kept(text):
        weights = target(text)
        return [round(weight / 0.22) / 4 for weight in weights * (weights > 0.2)]

    prompt, sampling = (0, 3), Sampling(TEMPERATURE, top_p=TOP_P)
    found = joint_distribution(make, monkeypatch, prompt, sampling, 2)
    return found, distribution_of_strings(kept, prompt, NUM_TOKENS, 2)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [2, 1, 3])
@EVERY_DRAFTER
def test_another_tokenizer_keeps_the_joint_distribution(name, k, monkeypatch):
    found, expected = joint_of_two(name, k, monkeypatch)
    assert found == expected
    assert any(text[2] == 3 for text in found)


def test_distribution_before_filters_is_noticed(monkeypatch):
    """A fault of transformers' universal assisted decoding (issue 47932)."""
    right = verification.draw

    def raw(row, sampling, history, uniform):
        token, _ = right(row, sampling, history, uniform)
        return token, row_distribution(row, Sampling(sampling.temperature), history)

    monkeypatch.setattr(verification, "draw", raw)
    found, expected = joint_of_two("model", 2, monkeypatch)
    assert found != expected


@EVERY_K
@EVERY_DRAFTER
def test_greedy_text_equals_plain_decoding(name, k):
    target = hashed_distribution(1, NUM_TOKENS, peak=2)
    plain, _ = run(target, DRAFTERS[name](OtherTokens(like(target))), 0)
    model = OtherTokens(like(target))
    tokens, rounds = run(target, DRAFTERS[name](model), k)
    assert tokens == plain
    assert {3, 5} <= {*tokens}
    assert any(one.num_accepted for one in rounds)
    assert any(one.num_accepted < one.num_drafted for one in rounds)
    text = READINGS.read([5, 0, 3, 1, *tokens])
    assert model.rows[: model.length] == text[: model.length]
    assert model.length > (50 if name == "model" else 0)


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
@EVERY_DRAFTER
def test_rollback_leaves_the_readings_of_committed_tokens(name, temperature):
    """After each round, whatever was drafted, forced or rejected in it."""
    target = hashed_distribution(1, NUM_TOKENS)
    model = OtherTokens(like(target))
    plan = FixedPlan(DRAFTERS[name](model), 4)
    decoder = SpeculativeDecoder(TableModel(target), plan, Stopwatch())
    text = [3, 5, 0]
    for round_ in decoder.rounds(text, Sampling(temperature), 3, 80):
        text += round_.tokens
        read = READINGS.read(text[:-1])
        assert model.rows[: model.length] == read[: model.length]


def test_same_distribution_is_always_accepted():
    """A draft that is the target, restricted to shared tokens, is never rejected."""

    def target(text):
        weights = hashed_distribution(1, NUM_TOKENS)(text).copy()
        weights[[3, 5]] = 0
        return weights / weights.sum()

    for k in (1, 4):
        drafter = DRAFTERS["model"](OtherTokens(like(target, noise=0)))
        _, rounds = run(target, drafter, k, Sampling(1.0))
        assert all(one.num_accepted == one.num_drafted for one in rounds)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("context", [5, 8, 16])
@pytest.mark.parametrize("prompt", [1, 4, 40])
def test_greedy_text_beyond_the_context_equals_plain_decoding(k, context, prompt):
    target = hashed_distribution(1, NUM_TOKENS)
    model = OtherTokens(hashed_distribution(2, len(IDS)), context_length=context)
    drafter = DraftModel(model, context_length=context, readings=READINGS)
    prompt = [i % NUM_TOKENS for i in range(3, 3 + prompt)]
    plain, _ = run(target, DRAFTERS["model"](OtherTokens(like(target))), 0, prompt=prompt)
    tokens, rounds = run(target, drafter, k, prompt=prompt)
    assert tokens == plain
    assert all(one.num_drafted for one in rounds[:-1])


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@EVERY_DRAFTER
def test_shorter_request_is_a_prefix_across_a_slide(name, temperature):
    target = hashed_distribution(1, NUM_TOKENS)

    def text(count):
        model = OtherTokens(hashed_distribution(2, len(IDS)), context_length=11)
        drafter = DRAFTERS[name](model)
        model_drafter = drafter.drafters[-1] if name == "chain" else drafter
        model_drafter.context_length = 11
        return run(target, drafter, 4, Sampling(temperature), count=count)[0]

    longest = text(40)
    assert all(text(count) == longest[:count] for count in range(1, 40, 3))


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("context_length", [99, 13])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@EVERY_DRAFTER
def test_outputs_after_other_requests_equal_those_of_fresh_models(
    name, temperature, context_length
):
    random, earlier = np.random.default_rng(1), [0, 3, 2]
    target_distribution = hashed_distribution(1, NUM_TOKENS)
    models = [
        OtherTokens(like(target_distribution), context_length=context_length) for _ in range(2)
    ]
    for seed in range(8):
        kept = int(random.integers(1, len(earlier) + 1))
        prompt = earlier[:kept] + random.integers(0, NUM_TOKENS, 3).tolist()
        texts = []
        for model in models:
            reader = DraftModel(model, context_length=context_length, readings=READINGS)
            drafter = reader if name == "model" else Chain(Suffix(), reader)
            texts.append(
                run(target_distribution, drafter, 3, Sampling(temperature), seed, 12, prompt)[0]
            )
        assert texts[0] == texts[1]
        earlier = [*prompt, *texts[0]]
        models[1] = OtherTokens(like(target_distribution), context_length=context_length)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_apply_to_the_targets_tokens(temperature):
    """Token 4 of the text is token 0 of the draft, and token 0 is token 5."""
    sampling = Sampling(temperature, bad_words=((4,),), logit_bias={1: -50.0, 0: 20.0})
    for seed in range(20):
        drafter = DRAFTERS["model"](OtherTokens(hashed_distribution(seed, len(IDS))))
        uniforms = np.random.default_rng(seed).random(4)
        draft = drafter.propose(History([3, 1]), 4, sampling, uniforms)
        assert draft.tokens == [0] * 4
        if temperature:
            assert [one.of(4) for one in draft.probs] == [0] * 4


class FewTokens(TableModel):
    """A draft that has tokens 0, 1 and the end of a grammar's text."""

    def forward(self, tokens, num_rows=None):
        return Logits(super().forward(tokens, num_rows).array(), np.array([0, 1, END]))


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("context", [9, 64])
def test_forced_tokens_of_several_draft_tokens_are_read(temperature, k, context):
    """Token 2 (c) is three tokens of the draft, whose context it may not exceed."""
    readings = TokenReadings.from_lists([[5], [4], [3, 1, 3], [0]], [6])
    grammar = constraint("regex", "(abc(a|b|c)cba(ab|cc))+c")
    sampling = Sampling(temperature, end_tokens=(END,), constraint=grammar)
    target = hashed_distribution(1, END + 1)
    model = FewTokens(hashed_distribution(2, 3), context_length=context)
    drafter = DraftModel(model, context_length=context, readings=readings)
    tokens, rounds = run(target, drafter, k, sampling, prompt=[0, 2], count=40)
    plain, _ = run(target, drafter, 0, sampling, prompt=[0, 2], count=40)
    assert temperature or tokens == plain
    assert 2 in tokens[2:]
    assert {"model", "grammar"} <= {name for one in rounds for name in one.sources}
