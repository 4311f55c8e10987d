"""Bad words, biases and least lengths, by the embedded pair's own tokens."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest

from specedge import OptionError
from specedge.request import GenerationRequest
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.text.bad_words import resolve_sampling
from specedge.sampling_options import DecodingDefaults

PROMPT = "def read_config(path):"


def words_of(pipeline, *words):
    return resolve_sampling(
        GenerationRequest(bad_words=words), pipeline.bundle, pipeline.tokenizer
    ).bad_words


def test_a_bad_word_is_banned_with_and_without_leading_space(pipeline):
    def tokens(text):
        return tuple(pipeline.tokenizer.encode(text, add_special_tokens=False).ids)

    assert words_of(pipeline, "self") == (tokens("self"), tokens(" self"))
    assert words_of(pipeline, " self", "\n") == (tokens(" self"), tokens("\n"))
    assert words_of(pipeline, [5, 6], "self", (5, 6)) == ((5, 6), tokens("self"), tokens(" self"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_never_generated_and_greedy_text_is_independent_of_k(pipeline, temperature):
    free = pipeline.generate(PROMPT, 80, temperature, seed=1)
    word = next(w for w in ("self", "return", "open", "if") if w in free.text)
    banned = pipeline.generate(PROMPT, 80, temperature, seed=1, bad_words=[word])
    assert word not in re.findall(r"\w+", banned.text)  # within another it is no word
    if not temperature:
        plain = pipeline.generate(PROMPT, 80, bad_words=[word], num_draft_tokens=0)
        assert banned.tokens == plain.tokens


@pytest.mark.parametrize("k", [0, 4])
def test_min_new_tokens_suppresses_end_tokens(pipeline, k):
    free = pipeline.generate(PROMPT, 40, num_draft_tokens=k, ignore_eos=True).tokens
    bundle = dataclasses.replace(pipeline.bundle, end_tokens=(free[3],))
    one = Pipeline(bundle, pipeline.tokenizer, pipeline.target, pipeline.draft)
    first = one.generate(PROMPT, 40, num_draft_tokens=k)
    assert (first.finish_reason, len(first.tokens)) == ("end", free.index(free[3]) + 1)
    held = one.generate(PROMPT, 40, num_draft_tokens=k, min_new_tokens=20)
    assert free[3] not in held.tokens[:20]
    assert held.tokens[:3] == free[:3]
    assert held.tokens == one.generate(PROMPT, 40, num_draft_tokens=0, min_new_tokens=20).tokens
    ignored = one.generate(PROMPT, 40, num_draft_tokens=k, min_new_tokens=20, ignore_eos=True)
    assert ignored.tokens == free


@pytest.mark.parametrize("k", [1, 8])
def test_penalized_greedy_tokens_equal_plain_decoding(pipeline, k):
    edits = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    edits["logit_bias"] = {5: 2.5, 9: -100}
    plain = pipeline.generate(PROMPT, 60, num_draft_tokens=0, **edits)
    assert pipeline.generate(PROMPT, 60, num_draft_tokens=k, **edits).tokens == plain.tokens
    assert plain.tokens != pipeline.generate(PROMPT, 60).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {10**6: 1}}, "logit_bias has token 1000000"),
        ({"bad_words": [[1, 10**6]]}, "bad_words has token 1000000"),
        ({"bad_words": ["a\udcff"]}, "not valid Unicode"),
    ],
)
def test_unknown_tokens_and_words_are_rejected_before_generation(pipeline, options, message):
    with pytest.raises(OptionError, match=message):
        pipeline.stream(PROMPT, **options)


def test_options_that_ban_every_token_are_rejected(pipeline):
    every = [[token] for token in range(pipeline.bundle.target.vocab_size)]
    for temperature in (0.0, 1.0):
        with pytest.raises(OptionError, match="leave no token"):
            pipeline.generate(PROMPT, 5, temperature, bad_words=every, ignore_eos=True)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_seed_reproduces_text_streamed_shortened_or_stopped(pipeline, temperature):
    options = {"seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3, "typical_p": 0.95}
    options |= {"bad_words": ["self"], "logit_bias": {9: 3.0}, "min_new_tokens": 8, "top_p": 0.9}
    options |= {"lenience": 0.7, "frequency_penalty": 0.2, "min_p": 0.01, "ignore_eos": True}
    whole = pipeline.generate(PROMPT, 60, temperature, **options)
    stream = pipeline.stream(PROMPT, 60, temperature, **options)
    assert "".join(stream) == whole.text
    assert stream.generation.tokens == whole.tokens
    for length in (8, 9, 23):
        assert (
            pipeline.generate(PROMPT, length, temperature, **options).tokens
            == (whole.tokens[:length])
        )
    with pipeline.stream(PROMPT, 60, temperature, **options) as left:
        next(left)
    count = len(left.generation.tokens)
    assert left.generation.tokens == whole.tokens[:count]
    if not temperature:
        for k in (0, 7):
            one = pipeline.generate(PROMPT, 60, num_draft_tokens=k, **options)
            assert one.tokens == whole.tokens


def test_model_defaults_apply_unless_the_request_sets_them(pipeline):
    defaults = DecodingDefaults(3, suppress_tokens=(5, 7), begin_suppress_tokens=(9,))
    bundle = SimpleNamespace(
        decoding_defaults=defaults, target=pipeline.bundle.target, end_tokens=()
    )

    def resolved(**options):
        sampling = resolve_sampling(GenerationRequest(**options), bundle, pipeline.tokenizer)
        assert (sampling.suppress_tokens, sampling.begin_suppress_tokens) == ((5, 7), (9,))
        return sampling.no_repeat_ngram_size

    assert [resolved(), resolved(no_repeat_ngram_size=2), resolved(no_repeat_ngram_size=0)] == [
        3, 2, 0,
    ]  # fmt: skip


@pytest.mark.parametrize("k", [0, 4])
def test_texts_do_not_repeat_ngrams(pipeline, k):
    prompt = pipeline.prompts.tokens(PROMPT)
    options = {"ignore_eos": True, "no_repeat_ngram_size": 2}
    tokens = [*prompt, *pipeline.generate(prompt, 80, num_draft_tokens=k, **options).tokens]
    pairs = list(itertools.pairwise(tokens))
    assert len(set(pairs)) == len(pairs)
