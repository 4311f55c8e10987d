"""Request options and their validation."""

import dataclasses
import pickle
import typing
from decimal import Decimal

import pytest

from specedge.errors import OptionError
from specedge.request import GenerationRequest, RequestOptions, build_request
from specedge.sampling_options import Sampling


def test_the_types_of_generate_are_those_of_a_request():
    fields = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert fields == {"max_new_tokens", "temperature", *RequestOptions.__annotations__}
    ours, theirs = typing.get_type_hints(RequestOptions), typing.get_type_hints(GenerationRequest)
    assert all(ours[name] == theirs[name] for name in ours if name != "logit_bias")


def test_options_are_hashable():
    one = Sampling(logit_bias={7: 1, 3: -2.5}, bad_words=[[1, 2], [5]])
    two = Sampling(logit_bias=((3, -2.5), (7, 1.0)), bad_words=((1, 2), (5,)))
    assert one == two
    assert hash(one) == hash(two)
    assert GenerationRequest(logit_bias={"7": 1, 3: -2.5}, bad_words=[[1, 2], (5,)]).sampling(
        [[1, 2], [5]]
    ) == Sampling(logit_bias={3: -2.5, 7: 1}, bad_words=[[1, 2], [5]])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": 2},
        {"typical_p": 0},
        {"typical_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": "1"},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": float("nan")},
        {"lenience": 0},
        {"lenience": 1.5},
        {"min_new_tokens": -1},
        {"min_new_tokens": 1.5},
        {"logit_bias": 5},
        {"logit_bias": "12"},
        {"logit_bias": [[1, 2, 3]]},
        {"top_p": Decimal("0.5")},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: "a"}},
        {"logit_bias": {1: float("-inf")}},
        {"logit_bias": {1: 2, "1": 3}},
        {"bad_words": 5},
    ],
)
@pytest.mark.parametrize("kind", [Sampling, GenerationRequest])
def test_impossible_options_are_refused_when_built(kind, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        kind(**options)


@pytest.mark.parametrize("words", [[""], [[]], [5], [[-1]], [["a"]], [b"x"]])
def test_impossible_bad_words_are_refused_when_built(words):
    with pytest.raises(ValueError, match="bad word"):
        GenerationRequest(bad_words=words)


def test_text_bad_words_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"bad_words must be token ids here, got 'x'"):
        Sampling(bad_words=["x"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens 5 is above max_new_tokens 4"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
    ],
)
def test_impossible_requests_are_refused_when_built(options, message):
    with pytest.raises(ValueError, match=message):
        GenerationRequest(**options)


def test_none_is_an_options_default():
    names = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert GenerationRequest(**dict.fromkeys(names)) == GenerationRequest()


def test_an_unknown_option_gets_the_nearest_name():
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean 'temperature'"):
        build_request(temprature=1)


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("temperature", {"temperature": -1}),
        ("top_k", {"top_k": "x"}),
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("min_new_tokens", {"min_new_tokens": 9, "max_new_tokens": 3}),
        ("num_draft_tokens", {"num_draft_tokens": 99}),
        ("num_draft_tokens", {"num_draft_tokens": "many"}),
        ("num_draft_tokens", {"num_draft_tokens": 1, "replay": [("model", 1, 1)]}),
        ("replay", {"replay": []}),
        ("replay", {"replay": [("model", 99, 1)]}),
        ("replay", {"replay": [("model", 1, 2**30)]}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": 3}),
        ("logit_bias", {"logit_bias": 3}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {1: 1000}}),
        ("logit_bias", {"logit_bias": [(1, 1), (1, 2)]}),
        ("bad_words", {"bad_words": 3}),
        ("bad_words", {"bad_words": [""]}),
        ("bad_words", {"bad_words": [[-1]]}),
        ("lookup_min", {"lookup_min": 2, "drafter": "model"}),
        ("lookup_min", {"lookup_min": 3, "lookup_max": 2, "drafter": "lookup"}),
        ("remember", {"remember": True, "drafter": "model"}),
        ("exact", {"exact": True, "temperature": 1}),
        ("drafter", {"drafter": "none"}),
        ("drafter", {"drafter": 3}),
        ("json_schema", {"json_schema": "{"}),
        ("json_schema", {"json_schema": {"a": object()}}),
        ("json_schema", {"json_schema": "[]"}),
        ("regex", {"regex": ""}),
        ("regex", {"regex": "a", "ignore_eos": True}),
        ("grammar", {"regex": "a", "grammar": "b"}),
    ],
)
def test_an_error_has_the_name_of_its_option(option, options):
    with pytest.raises(OptionError) as caught:
        build_request(**options)
    assert caught.value.option == option
    assert pickle.loads(pickle.dumps(caught.value)).option == option
