"""The first verify pass reads the end of the prompt, too, where that changes no bit."""

from dataclasses import replace

import numpy as np
import pytest

from fakes import TableModel, hashed_distribution
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch, TimedModel
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.planning.plans import FixedPlan
from specedge.sampling_options import Sampling

TARGET, DRAFT = hashed_distribution(1, 6), hashed_distribution(2, 6)
PROMPT = [i % 6 for i in range(11)]


def text_and_passes(k, max_first_length, temperature=0.0, cached=0):
    target = TableModel(TARGET)
    target.prefill(PROMPT[:cached])
    plan = FixedPlan(DraftModel(TableModel(DRAFT)), k)
    decoder = SpeculativeDecoder(target, plan, Stopwatch(), max_first_length=max_first_length)
    rounds = list(decoder.rounds(PROMPT, Sampling(temperature), 7, 24))
    return [token for one in rounds for token in one.tokens], target.passes, len(rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_first_pass_of_prompt_and_draft_keeps_the_text(k, temperature):
    found, passes, num_rounds = text_and_passes(k, 64, temperature)
    alone, apart, _ = text_and_passes(k, 1, temperature)
    assert found == alone
    assert passes[0] == len(PROMPT) + k
    assert apart[0] == 1 + k
    assert passes[1:] == apart[1:]
    assert len(passes) == num_rounds


@pytest.mark.parametrize("longest", [1, 10, 11, 13, 14, 19])
@pytest.mark.parametrize("k", [0, 3])
def test_first_pass_includes_whole_prompt_remainder_or_none(k, longest):
    found, passes, _ = text_and_passes(k, longest)
    fits = len(PROMPT) + k <= longest
    assert passes[0] == (len(PROMPT) + k if fits else 1 + k)
    assert found == text_and_passes(k, 1)[0]


def test_k_of_first_round_decides_whether_pass_includes_prompt():
    """Not the largest that may follow: a plan whose first round is plain may draft 16 later."""

    class Growing(FixedPlan):
        def next(self, history, left):
            step = super().next(history, left)
            return replace(
                step, num_draft_tokens=self.max_draft_tokens if history.num_new_tokens else 0
            )

    target = TableModel(TARGET)
    plan = Growing(DraftModel(TableModel(DRAFT)), 16)
    decoder = SpeculativeDecoder(target, plan, Stopwatch(), max_first_length=len(PROMPT))
    rounds = list(decoder.rounds(PROMPT, Sampling(), 7, 24))
    assert target.passes[:2] == [len(PROMPT), 17]
    found = [token for one in rounds for token in one.tokens]
    assert found[:24] == text_and_passes(0, 1)[0]


class OtherBits(TableModel):
    """Model in which passes of more than five tokens write different cache rows."""

    def forward(self, tokens, num_rows=None):
        return super().forward(self._rows(tokens), num_rows)

    def prefill(self, tokens):
        super().prefill(self._rows(tokens))

    def _rows(self, tokens):
        return [token + 6 for token in tokens] if len(tokens) > 5 else tokens


@pytest.mark.parametrize("length", [2, 5, 6, 20])
@pytest.mark.parametrize("longest", [1, 3, 5])
def test_logits_are_bitwise_equal_for_every_k(length, longest):
    found = []
    for k in range(5):
        plan = FixedPlan(DraftModel(TableModel(DRAFT)), k)
        decoder = SpeculativeDecoder(OtherBits(TARGET), plan, Stopwatch(), max_first_length=longest)
        rounds = decoder.rounds([i % 6 for i in range(length)], Sampling(), 0, 24)
        found.append([token for one in rounds for token in one.tokens][:24])
    assert found == [found[0]] * 5


def test_cached_tokens_are_not_read_in_the_first_pass():
    assert text_and_passes(2, 64, cached=8)[1][0] == len(PROMPT) - 8 + 2
    assert text_and_passes(2, 64, cached=len(PROMPT))[1][0] == 1 + 2


def test_prefill_time_is_not_counted_in_the_first_round(monkeypatch):
    """Passes of 11, 2 and 2 tokens; a token takes a second."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(TableModel):
        def forward(self, tokens, num_rows=None):
            now[0] += len(tokens)
            return super().forward(tokens, num_rows)

    watch = Stopwatch()
    model = TimedModel(Slow(TARGET), watch, "verify")
    assert model.seconds_of_first == 0
    model.forward(PROMPT, 1)
    assert model.seconds_of_first == pytest.approx(1)  # one of eleven rows
    for token in (1, 2):
        model.truncate(model.length)
        model.forward([token, token], 2)
    assert model.seconds_of_first == 2
    assert model.num_passes == 3
    assert dict(watch.seconds) == {"prefill": 11, "verify": 4}


def test_exact_requests_prefill_separately(pipeline):
    prompt = pipeline.tokenizer.encode("def read_config(path):\n    return").ids
    read = []
    inner = pipeline.target.forward
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(
            pipeline.target,
            "forward",
            lambda tokens, num_rows=None: read.append(len(tokens)) or inner(tokens, num_rows),
        )
        for exact in (False, True):
            pipeline.forget()
            pipeline.generate(prompt, 1, num_draft_tokens=0, exact=exact)
    assert read == [len(prompt), 1]
    pipeline.forget()


@pytest.mark.parametrize(("k", "options"), [(0, {}), (4, {}), (8, {"temperature": 0.9, "seed": 5})])
def test_texts_equal_those_of_separate_prefill_bitwise(pipeline, k, options, monkeypatch):
    prompt = pipeline.tokenizer.encode("def read_config(path):\n    with open(path) as f:\n").ids
    assert pipeline.max_first_length >= len(prompt) + k
    found = []
    for longest in (None, 1):
        if longest:
            monkeypatch.setattr(pipeline, "max_first_length", longest)
        pipeline.forget()
        one = pipeline.generate(
            prompt, 24, num_draft_tokens=k, ignore_eos=True, logprobs=2, **options
        )
        assert one.stats.num_target_passes == one.stats.num_rounds
        found.append((one.tokens, one.logprobs, np.array(pipeline.target.cache_rows(0, 40))))
    pipeline.forget()
    assert found[0][:2] == found[1][:2]
    assert np.array_equal(found[0][2], found[1][2])
