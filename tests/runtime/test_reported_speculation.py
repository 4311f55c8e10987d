"""Reports of other servers' users: a request with drafts has the result of plain decoding."""

import json

import pytest

from specedge.request import DrafterName

LOOP = "x = 1\ny = 2\n" * 6
DRAFTS = [
    {"num_draft_tokens": 8, "drafter": "suffix"},
    {"num_draft_tokens": 8, "drafter": "model"},
    {"num_draft_tokens": 3, "drafter": "chain"},
    {"num_draft_tokens": 16, "drafter": "suffix", "remember": True},
]
IDS = [f"{drafts['drafter']}-{drafts['num_draft_tokens']}" for drafts in DRAFTS]


def result(generation):
    logprobs = None if generation.logprobs is None else len(generation.logprobs)
    return generation.text, generation.tokens, generation.finish_reason, logprobs


@pytest.mark.parametrize("drafts", DRAFTS, ids=IDS)
@pytest.mark.parametrize("stop", ["y = 2\nx", "= 1\ny = 2\nx = 1", " 2", "\n"])
def test_stop_string_in_accepted_tokens_ends_text_at_first_match(pipeline, stop, drafts):
    options = {"max_new_tokens": 40, "stop": [stop], "logprobs": 2}
    plain = pipeline.generate(LOOP, num_draft_tokens=0, **options)
    assert stop not in plain.text
    assert result(pipeline.generate(LOOP, **options, **drafts)) == result(plain)


@pytest.mark.parametrize("drafts", DRAFTS, ids=IDS)
def test_finish_reason_with_length_limit_and_stop_string_in_one_round(pipeline, drafts):
    for length in (1, 5, 6, 7, 8, 9, 13):
        options = {"max_new_tokens": length, "stop": ["y = 2\nx"]}
        plain = pipeline.generate(LOOP, num_draft_tokens=0, **options)
        assert len(plain.tokens) <= length
        assert result(pipeline.generate(LOOP, **options, **drafts)) == result(plain)


@pytest.mark.parametrize("drafts", DRAFTS, ids=IDS)
@pytest.mark.parametrize(
    "options",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 7, "logit_bias": {0: 30}},
    ],
)
def test_penalties_and_minimum_length_count_the_same_tokens(pipeline, options, drafts):
    options = {"max_new_tokens": 24, **options}
    plain = pipeline.generate(LOOP, num_draft_tokens=0, **options)
    drafted = pipeline.generate(LOOP, **options, **drafts)
    assert result(drafted) == result(plain)
    if "min_new_tokens" in options:
        assert len(plain.tokens) == 8  # seven and the end token


@pytest.mark.parametrize("drafter", [name for name in DrafterName if name != "auto"])
def test_complete_grammar_ends_text_for_any_draft(pipeline, drafter):
    prompt = 'value = 1\nvalue = 1, "b": 2}\nvalue = '
    options = {"json_schema": {"const": 1}, "max_new_tokens": 20}
    plain = pipeline.generate(prompt, num_draft_tokens=0, **options)
    assert json.loads(plain.text) == 1
    drafted = pipeline.generate(prompt, num_draft_tokens=16, drafter=drafter, **options)
    assert result(drafted) == result(plain)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 8])
def test_character_of_several_tokens_is_never_split_in_a_stream(pipeline, k, length):
    tokens = pipeline.tokenizer.encode("😀한", add_special_tokens=False).ids
    assert len(tokens) > 4
    text = "".join(f"<[{token}]> " for token in tokens)
    options = {"grammar": f"start: {text}", "max_new_tokens": length, "num_draft_tokens": k}
    stream = pipeline.stream("print('", **options)
    pieces = list(stream)
    assert "".join(pieces) == stream.generation.text
    complete = pipeline.tokenizer.decode(stream.generation.tokens).removesuffix("\ufffd")
    assert stream.generation.text.rstrip("\ufffd") == complete.rstrip("\ufffd")
    assert all("\ufffd" not in piece for piece in pieces[:-1])
