"""Texts of the embedded pair: exactness, ends, counts, distributions."""

import dataclasses

import numpy as np
import pytest

import specedge
from cases import slow
from specedge.bundle import store
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling, SamplingRules

PROMPTS = ("def read_config(path):", "class Parser:\n    def __init__(self", "import ")


def with_end_tokens(pipeline, *tokens):
    """The same pair, for which other tokens end a text."""
    bundle = dataclasses.replace(pipeline.bundle, end_tokens=tokens)
    return Pipeline(bundle, pipeline.tokenizer, pipeline.target, pipeline.draft)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_equal_plain_decoding(pipeline, prompt, k):
    plain = pipeline.generate(prompt, 200, num_draft_tokens=0, ignore_eos=True)
    speculative = pipeline.generate(prompt, 200, num_draft_tokens=k, ignore_eos=True)
    assert speculative.tokens == plain.tokens
    assert speculative.text == plain.text
    assert speculative.stats.num_rounds < plain.stats.num_rounds == 200


@pytest.mark.usefixtures("all_cpus")
@pytest.mark.parametrize("ops", ["gqa", slow("onnx")])
def test_greedy_text_on_all_cpus_does_not_depend_on_k(ops):
    pair = specedge.load(store.embedded_folder(), ops=ops)
    texts = [
        pair.generate(PROMPTS[0], 60, num_draft_tokens=k, ignore_eos=True).tokens
        for k in (0, 1, 4, 8, "auto")
    ]
    assert texts == texts[:1] * 5


@pytest.mark.parametrize("role", ["target", "draft"])
def test_stale_cache_rows_after_rollback_are_ignored(pipeline, role):
    model = getattr(pipeline, role)
    model.truncate(0)
    model.prefill(range(1, 20))
    clean = model.forward([20, 21, 22]).array().copy()
    model.forward(range(30, 60))
    model.truncate(19)
    assert np.array_equal(model.forward([20, 21, 22]).array(), clean)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_self_draft_gives_k_plus_one_tokens_every_round(self_draft, k, temperature):
    count = 200 // (k + 1) * (k + 1)
    one = self_draft.generate(
        PROMPTS[0], count, temperature, seed=3, num_draft_tokens=k, ignore_eos=True
    )
    assert [len(r.tokens) for r in one.rounds] == [k + 1] * (count // (k + 1))
    assert one.stats.num_draft_passes == k * one.stats.num_rounds


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("count", [1, 3, 30])
@pytest.mark.parametrize("temperature", [0, 1])  # a greedy round never overshoots
def test_max_new_tokens_is_respected(pipeline, k, count, temperature):
    options = {"num_draft_tokens": k, "ignore_eos": True, "seed": 1}
    one = pipeline.generate(PROMPTS[0], count, temperature, **options)
    assert (len(one.tokens), one.finish_reason) == (count, "length")
    assert one.stats.num_new_tokens == count


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [4, 0, 1, 8])
@pytest.mark.parametrize("at", [2, 0, 1, 3, 4, 5, 11])
def test_end_token_within_round_truncates_the_text(pipeline, k, at):
    whole = pipeline.generate(PROMPTS[1], 40, num_draft_tokens=k, ignore_eos=True)
    end = whole.tokens[at]
    first = whole.tokens.index(end)
    one = with_end_tokens(pipeline, end).generate(PROMPTS[1], 40, num_draft_tokens=k)
    assert (one.tokens, one.finish_reason) == (whole.tokens[: first + 1], "end")
    before = pipeline.generate(PROMPTS[1], first or 1, num_draft_tokens=0, ignore_eos=True)
    assert one.text == (before.text if first else "")
    ignored = with_end_tokens(pipeline, end).generate(
        PROMPTS[1], 40, num_draft_tokens=k, ignore_eos=True
    )
    assert ignored.tokens == whole.tokens


@pytest.mark.parametrize("k", [0, 1, 4])
def test_a_stop_string_ends_the_text_before_it(pipeline, k):
    whole = pipeline.generate(PROMPTS[0], 60, num_draft_tokens=k, ignore_eos=True)
    for start, size in ((1, 1), (9, 2), (23, 9)):
        stop = whole.text[start : start + size]
        one = pipeline.generate(
            PROMPTS[0], 60, num_draft_tokens=k, stop=["never so", stop], ignore_eos=True
        )
        assert one.text == whole.text[: whole.text.index(stop)]
        assert one.finish_reason == "stop"
        assert one.tokens == whole.tokens[: len(one.tokens)]


def test_a_shorter_request_is_a_prefix_of_a_longer_one(pipeline):
    longest = pipeline.generate(PROMPTS[2], 40, 1.0, seed=5, ignore_eos=True)
    for count in (1, 2, 3, 5, 17):
        one = pipeline.generate(PROMPTS[2], count, 1.0, seed=5, ignore_eos=True)
        assert one.tokens == longest.tokens[:count]


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("left", [1, 2, 5, 13])
def test_generation_fills_context_to_last_position(pipeline, k, left):
    context = pipeline.bundle.context_length
    prompt = (pipeline.tokenizer.encode(PROMPTS[1]).ids * context)[: context - left]
    one = pipeline.generate(prompt, 10 * left, num_draft_tokens=k, ignore_eos=True)
    plain = pipeline.generate(prompt, 10 * left, num_draft_tokens=0, ignore_eos=True)
    assert (len(one.tokens), one.finish_reason) == (left, "context")
    assert one.tokens == plain.tokens


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=20),
        Sampling(0.8, top_p=0.8, min_p=0.02),
        Sampling(1.2, top_k=8, repetition_penalty=1.5, presence_penalty=2.0, frequency_penalty=1.0),
    ],
)
def test_first_tokens_follow_target_distribution(pipeline, sampling):
    """Chi-square of the joint distribution of two tokens against the target's rows, rare cells
    pooled.
    """
    scipy_stats = pytest.importorskip("scipy.stats")
    prompt, runs = pipeline.tokenizer.encode(PROMPTS[2]).ids, 150
    options = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(SamplingRules)}
    counts = {}
    for seed in range(runs):
        one = pipeline.generate(
            prompt, 2, seed=seed, num_draft_tokens=4, ignore_eos=True, **options
        )
        counts[tuple(one.tokens)] = counts.get(tuple(one.tokens), 0) + 1

    def row(*tokens):
        pipeline.target.truncate(0)
        logits = pipeline.target.forward([*prompt, *tokens])[-1].array()
        return probabilities(logits, sampling, History(prompt, tokens)).row(len(logits))

    expected = {}
    for first, p in ((int(t), float(row()[t])) for t in np.flatnonzero(row())):
        second = row(first)
        for t in np.flatnonzero(second):
            expected[first, int(t)] = runs * p * float(second[t])
    assert set(counts) <= set(expected)
    cells = [(counts.get(c, 0), e) for c, e in expected.items() if e >= 5]
    rest = (runs - sum(n for n, _ in cells), runs - sum(e for _, e in cells))
    cells += [rest] if rest[1] > 1 else []
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    assert len(cells) >= 4
    assert scipy_stats.chi2.sf(statistic, len(cells) - 1) > 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_coupled_text_does_not_depend_on_drafter_and_k(pipeline, temperature):
    drafting = [("model", 1), ("model", 4), ("model", 8), ("suffix", 3), ("chain", 6)]
    drafting += [("auto", "auto")]
    plain = []
    for seed in range(2):
        options = {"seed": seed, "coupling": "gumbel", "ignore_eos": True}
        plain.append(pipeline.generate(PROMPTS[0], 16, temperature, num_draft_tokens=0, **options))
        for name, k in drafting:
            options |= {"drafter": name, "num_draft_tokens": k}
            drafted = pipeline.generate(PROMPTS[0], 16, temperature, **options)
            assert drafted.tokens == plain[-1].tokens
    assert plain[0].tokens != plain[1].tokens
