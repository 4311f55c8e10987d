"""Prefix cache reuse saves passes and changes no bit."""

import numpy as np
import pytest

from fakes import Counting, TableModel, hashed_distribution
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import common_prefix_length
from specedge.sampling_options import Sampling

PROMPT = "def read_config(path):\n    with open(path) as file:\n"


def test_the_common_prefix_ends_at_the_first_difference():
    assert common_prefix_length([], [1]) == 0
    assert common_prefix_length([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix_length([1, 2], [1, 2, 4]) == 2
    assert common_prefix_length([1, 2, 4], [1, 2]) == 2


@pytest.mark.parametrize("context_length", [99, 13])
@pytest.mark.parametrize("drafter", ["model", "chain"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_after_other_requests_equal_fresh_model_outputs(
    drafter, context_length, temperature
):
    """A table's distribution is of all tokens that its cache holds, so a wrong row would be another
    text.
    """
    random = np.random.default_rng(context_length)
    target, draft = _models(context_length)
    guesses = _drafter(drafter, draft, context_length)
    earlier = [0, 1, 2]
    for seed in range(8):
        kept = int(random.integers(1, len(earlier) + 1))
        prompt = earlier[:kept] + random.integers(0, 5, int(random.integers(0, 4))).tolist()
        k = int(random.integers(0, 6))
        run = (prompt, Sampling(temperature), seed, 12)
        found = _text(guesses, target, k, run)
        fresh_target, fresh_draft = _models(context_length)
        fresh = _text(_drafter(drafter, fresh_draft, context_length), fresh_target, k, run)
        assert found == fresh
        earlier = [*prompt, *found][:30]


def _models(context_length):
    target = TableModel(hashed_distribution(1, 5, peak=2))
    return target, TableModel(hashed_distribution(2, 4, peak=2), 4, context_length)


def _drafter(name, model, context_length):
    reader = DraftModel(model, context_length=context_length, vocab_size=4)
    return {"model": reader, "chain": Chain(Suffix(), reader)}[name]


def _text(drafter, target, k, run):
    decoder = SpeculativeDecoder(target, FixedPlan(drafter, k), Stopwatch())
    return [token for round_ in decoder.rounds(*run) for token in round_.tokens]


@pytest.fixture
def counted(pipeline):
    from specedge.runtime.requests.pipeline import Pipeline

    target, draft = Counting(pipeline.target), Counting(pipeline.draft)
    yield Pipeline(pipeline.bundle, pipeline.tokenizer, target, draft)
    _empty(pipeline)


def _empty(pipeline):
    pipeline.target.truncate(0)
    pipeline.draft.truncate(0)


def test_second_turn_processes_only_new_tokens(counted):
    prompt = counted.tokenizer.encode(PROMPT).ids
    options = {"num_draft_tokens": 4, "ignore_eos": True}
    first = counted.generate(prompt, 20, **options)
    turn = [*prompt, *first.tokens, *counted.tokenizer.encode("\n    return").ids]
    before = counted.target.num_read, counted.draft.num_read
    second = counted.generate(turn, 1, **options)
    num_new = len(turn) - len(prompt) - len(first.tokens)
    assert counted.target.num_read - before[0] <= num_new + 2
    again = counted.generate(turn, 12, **options)
    before = counted.draft.num_read
    counted.generate(turn, 12, **options)
    rounds = len(again.rounds)
    assert counted.draft.num_read - before <= 6 * rounds
    assert again.tokens[:1] == second.tokens


@pytest.mark.parametrize(
    ("drafter", "options"), [("model", {"temperature": 0.9, "top_p": 0.95}), ("chain", {})]
)
def test_prefix_reuse_preserves_generated_tokens(pipeline, drafter, options):
    request = {"drafter": drafter, "num_draft_tokens": 4, "seed": 3, "ignore_eos": True} | options
    prompt = pipeline.tokenizer.encode(PROMPT).ids
    for given in (prompt, prompt[:-3], [*prompt, *prompt[5:9]], prompt):
        found = pipeline.generate(given, 24, **request)
        _empty(pipeline)
        assert pipeline.generate(given, 24, **request).tokens == found.tokens
    with pipeline.stream(prompt, 24, **request) as stream:
        next(stream)
    assert pipeline.generate(prompt, 24, **request).tokens == found.tokens


def test_exact_requests_do_not_reuse_prefixes(counted):
    prompt = counted.tokenizer.encode(PROMPT).ids
    for exact in (False, True):
        counted.generate(prompt, 4, num_draft_tokens=0, exact=exact)
        before = counted.target.num_read
        counted.generate(prompt, 1, num_draft_tokens=0, exact=exact)
        read = counted.target.num_read - before
        assert read == (len(prompt) if exact else 1)
