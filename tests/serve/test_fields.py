"""Fields of requests: types, limits, defaults and neutral values."""

import json

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

from specedge.request import GenerationRequest
from specedge.serve import requests
from specedge.serve.choices import sse_event
from specedge.serve.errors import ApiError
from specedge.serve.fields import ANY, NEUTRAL, FieldReader

PARSERS = {
    "chat": (requests.parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
    "completions": (requests.parse_completion, {"prompt": "a"}),
    "responses": (requests.parse_response, {"input": "a"}),
}


def field_names(endpoint, monkeypatch):
    """Return the fields that an endpoint takes from a body."""
    readers = []

    class RecordingReader(FieldReader):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            readers.append(self)

    monkeypatch.setattr(requests, "FieldReader", RecordingReader)
    parse, body = PARSERS[endpoint]
    parse(body | {"stream": True}, 10)
    return readers[0]._names


@pytest.mark.parametrize("endpoint", PARSERS)
def test_null_is_absent_and_a_prompt_suffices(endpoint, monkeypatch):
    parse, body = PARSERS[endpoint]
    bare = parse(body, 500)
    nothing = dict.fromkeys(field_names(endpoint, monkeypatch)) | body
    assert parse(nothing, 500) == bare
    assert (bare.num_choices_each, bare.stream, bare.num_choices) == (1, False, 1)
    limit = 16 if endpoint == "completions" else 500
    assert bare.options == {"temperature": 1.0, "max_new_tokens": limit}


@pytest.mark.parametrize("endpoint", PARSERS)
def test_unsupported_value_is_refused_by_its_field(endpoint):
    parse, body = PARSERS[endpoint]
    for name, values in NEUTRAL[endpoint].items():
        if values is ANY:
            assert parse(body | {name: {"a": 1}}, 10)
            continue
        for value in values:
            assert parse(body | {name: value}, 10) == parse(body, 10)
        with pytest.raises(ApiError, match=rf"^{name} is not supported yet") as caught:
            parse(body | {name: {"a": [1]}}, 10)
        assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize("endpoint", PARSERS)
def test_speculative_sets_drafter_and_draft_tokens(endpoint):
    parse, body = PARSERS[endpoint]

    def options(**speculative):
        found = parse(body | {"speculative": speculative}, 10).options
        return found.get("drafter"), found.get("num_draft_tokens")

    assert options(drafter="chain", num_draft_tokens=3) == ("chain", 3)
    assert options(off=True) == (None, 0)
    assert options(off=False, drafter=None) == (None, None)
    assert options(num_draft_tokens="auto") == (None, "auto")
    for wrong in ({"off": True, "drafter": "model"}, {"drafter": 3}, {"num_draft_tokens": True}):
        with pytest.raises(ApiError, match=r"^speculative") as caught:
            options(**wrong)
        assert caught.value.param.startswith("speculative.")


def test_options_are_passed_to_the_pipeline():
    parse, body = PARSERS["completions"]
    options = {
        "temperature": 0.5,
        "top_p": 0.5,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "logit_bias": {"3": 1},
        "seed": 2,
        "stop": ["a"],
        "top_k": 3,
        "min_p": 0.1,
        "typical_p": 0.5,
        "repetition_penalty": 1.1,
        "bad_words": ["a"],
        "min_new_tokens": 1,
        "coupling": "gumbel",
        "json_schema": {"type": "object"},
    }
    found = parse(body | options, 10).options
    assert found == options | {"max_new_tokens": 10}
    assert GenerationRequest(**found).seed == 2


def test_output_item_can_be_sent_back_and_unknown_part_field_is_refused():
    def text(**more):
        part = {"type": "output_text", "text": "b", "annotations": [], "logprobs": [], **more}
        sent = {"role": "assistant", "content": [part], "type": "message", "id": "msg-1"}
        user = {"role": "user", "content": "a"}
        asked = requests.parse_response({"input": [user, sent | {"status": "incomplete"}]}, 10)
        return asked.prompts[0][1]["content"]

    assert text() == "b"
    with pytest.raises(ApiError, match=r"^input\[1\].*there is no field \"bold\"") as caught:
        text(bold=True)
    assert caught.value.param == "input[1].content[0].bold"


def test_event_is_one_line_for_any_client():
    found = sse_event({"text": "a\u2028b\x85c\u2029"})
    assert len(found.splitlines()) == 2
    assert json.loads(found.removeprefix("data: ")) == {"text": "a\u2028b\x85c\u2029"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
        ({"coupling": "maximal"}, "coupling must be residual or gumbel"),
        ({"coupling": ["gumbel"]}, "coupling must be residual or gumbel"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"min_new_tokens": 20}, "min_new_tokens 20 is above max_tokens 5"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"prompt": {"a": 1}}, "prompt must be text, token ids, or a list of either"),
        ({"prompt": []}, "prompt must be text, token ids, or a list of either"),
        ({"prompt": [1, True]}, "prompt must be text, token ids, or a list of either"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"model": 3}, "model must be a name, got 3"),
        ({"stop": ["a"] * 1025}, "stop must have at most 1024 entries, got 1025"),
        ({"bad_words": [[1]] * 1025}, "bad_words must have at most 1024 entries"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias must have at most 1024"),
        ({"stream_options": {"usage": True}, "stream": True}, 'there is no field "usage"'),
    ],
)
def test_invalid_value_is_reported_with_its_field(change, said):
    with pytest.raises(ApiError) as caught:
        requests.parse_completion({"prompt": "a", "max_tokens": 5} | change, 10)
    assert said in caught.value.message
    assert caught.value.param.partition(".")[0] in change


def test_earlier_call_without_arguments_has_an_empty_object():
    for given in ({"arguments": ""}, {"arguments": "{}"}, {}):
        call = {"id": "a", "type": "function", "function": {"name": "clock"} | given}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        asked = requests.parse_chat({"messages": messages}, 10)
        assert asked.prompts[0][0]["tool_calls"][0]["function"]["arguments"] == {}
