"""Request options and their validation."""

import dataclasses
import pickle
import typing
from decimal import Decimal

import pytest

from specedge import Draft
from specedge.errors import OptionError
from specedge.request import (
    MAX_GRAMMAR_LENGTH,
    GenerationRequest,
    RequestOptions,
    build_request,
)
from specedge.sampling_options import Sampling


def test_generate_annotations_match_request_types():
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


NAN, INFINITY = float("nan"), float("inf")
# Options, the first of which is wrong, and a part of the message.
INVALID = [
    *(({"temperature": value}, "temperature") for value in (-1, NAN, INFINITY)),
    ({"temperature": "1"}, "temperature must be a number"),
    ({"temperature": 10**400}, "temperature must be a number"),
    ({"temperature": [None]}, r"temperature must be a number, got \[None\]"),
    ({"min_p": "x" * 100}, "min_p must be a number, got 'x+'"),
    *(({"top_k": value}, "top_k") for value in (-1, "x")),
    ({"top_k": 2.0}, "top_k must be an integer"),
    ({"top_k": True}, "top_k must be an integer"),
    ({"temperature": True}, "temperature must be a number"),
    *(({"top_p": value}, "top_p") for value in (0, 1.5, "x", Decimal("0.5"))),
    *(({"min_p": value}, "min_p") for value in (-0.1, 2)),
    *(({"typical_p": value}, "typical_p") for value in (0, 1.1)),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, INFINITY, "1")),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    *(({"frequency_penalty": value}, "frequency_penalty") for value in (-2.1, NAN)),
    *(({"lenience": value}, "lenience") for value in (0, 1.5)),
    *(({"min_new_tokens": value}, "min_new_tokens") for value in (-1, 1.5)),
    *(({"no_repeat_ngram_size": value}, "no_repeat_ngram_size") for value in (-1, 1.5, True)),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens 9 is above max_new_tokens 3"),
    *(({"logit_bias": value}, "logit_bias") for value in (
        5, "12", [[1, 2, 3]], {-1: 1}, {"x": 1}, {1: 101}, {1: "a"}, {1: -INFINITY},
        {1: 2, "1": 3}, [(1, 1), (1, 2)])),
    *(({"bad_words": value}, "bad.word") for value in (
        5, [""], [[]], [5], [[-1]], [["a"]], [b"x"])),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
    ({"logprobs": -1}, "logprobs must be at least 0"),
    ({"seed": 1.5}, "seed must be an integer"),
    ({"ignore_eos": "no"}, "ignore_eos must be true or false"),
    ({"special_tokens": "all"}, "special_tokens must be true or false, got 'all'"),
    ({"exact": "no"}, "exact must be true or false"),
    ({"exact": True, "temperature": 0.5}, "exact applies to temperature 0"),
    ({"stop": [""]}, "stop string must not be empty"),
    *(({"stop": value}, "stop must be text") for value in (3, [1], b"x")),
    *(({"num_draft_tokens": value}, "num_draft_tokens must be between 0 and 64")
      for value in (65, -1)),
    ({"num_draft_tokens": 2.0}, "num_draft_tokens must be an integer"),
    ({"num_draft_tokens": "many"}, "'auto' or an integer"),
    ({"num_draft_tokens": 2, "replay": [["model", 1, 1]]}, "omit the option"),
    ({"replay": [["plain", 2, 3]]}, "K of .plain. rounds in replay must be 0, got 2"),
    *(({"replay": value}, "replay") for value in (
        [], "model", [["model", 1]], [["model", -1, 1]], [["model", 65, 1]], [["model", 1, 0]],
        [[1, 1, 1]], [["model", 1.5, 1]], [["model", 1, 2**20], ["model", 1, 1]], {"model": 1})),
    ({"drafter": "oracle"}, "drafter must be auto, model, lookup, suffix, chain, random or ngram:"),
    *(({"drafter": value}, "drafter must be") for value in ("ngram:", "")),
    *(({"drafter": value}, "an object with name, propose and truncate") for value in (5, Draft)),
    ({"lookup_min": 0, "drafter": "lookup"}, "lookup_min must be between 1 and 64"),
    ({"lookup_min": 4, "lookup_max": 3, "drafter": "chain"}, "at most lookup_max, got 4 and 3"),
    ({"lookup_min": 2, "drafter": "model"}, "lookup_min applies to suffix decoding"),
    ({"lookup_max": 2.5, "drafter": "lookup"}, "lookup_max must be an integer"),
    ({"lookup_max": 2, "drafter": "random"}, "lookup_max applies to"),
    *(({"remember": True, "drafter": name}, "applies to the drafters suffix, chain and auto only")
      for name in ("model", "random", "ngram:x")),
    *(({"regex": value}, "regex must be non-empty text") for value in ("", 3)),
    ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, "regex must have at most"),
    ({"regex": "a", "ignore_eos": True}, "omit ignore_eos"),
    ({"grammar": "b", "regex": "a"}, "grammar and regex cannot be combined"),
    *(({"json_schema": text}, "json_schema is not valid JSON") for text in ("[1", "[" * 10**5)),
    ({"json_schema": [1]}, "json_schema must be an object"),
    ({"json_schema": {"a": {1, 2}}}, "json_schema cannot be converted to JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_invalid_option_error_names_the_option(options, message):
    with pytest.raises(OptionError, match=message) as caught:
        build_request(**options)
    assert caught.value.option == next(iter(options))
    assert pickle.loads(pickle.dumps(caught.value)).option == caught.value.option
    assert len(str(caught.value)) < 400
    if options.keys() <= {field.name for field in dataclasses.fields(Sampling)}:
        with pytest.raises(ValueError, match="bad.word" if "bad_words" in options else message):
            Sampling(**options)


def test_text_bad_words_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"bad_words must be token ids here, got 'x'"):
        Sampling(bad_words=["x"])


def test_replay_is_accepted_with_auto_k():
    request = GenerationRequest(replay=[["model", 1, 1]], num_draft_tokens="auto")
    assert request.replay == (("model", 1, 1),)


def test_none_is_an_options_default():
    names = {field.name for field in dataclasses.fields(GenerationRequest)}
    assert GenerationRequest(**dict.fromkeys(names)) == GenerationRequest()


def test_unknown_option_error_suggests_nearest_name(pipeline):
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean 'temperature'"):
        pipeline.generate("a", temprature=1)
