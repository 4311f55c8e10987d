"""Fields of requests: types, limits, defaults, spellings and unknown ones."""

import json

import pytest

from specedge.request import GenerationRequest, build_request
from specedge.serve import requests
from specedge.serve.choices import sse_event
from specedge.serve.errors import ApiError
from specedge.serve.fields import NEUTRAL, UNSUPPORTED_FIELDS
from specedge.serve.requests import ParserSettings

PARSERS = {
    "chat": (requests.parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
    "completions": (requests.parse_completion, {"prompt": "a"}),
    "responses": (requests.parse_response, {"input": "a"}),
}


def parsed(endpoint, length=500, strict=False, **fields):
    """Return a request of the endpoint's shortest body and these fields."""
    parse, body = PARSERS[endpoint]
    return parse(body | fields, ParserSettings(length, strict=strict))


def options(endpoint="completions", length=500, **fields):
    return parsed(endpoint, length, **fields).options


@pytest.mark.parametrize("endpoint", PARSERS)
def test_null_fields_equal_omitted_fields(endpoint):
    bare = parsed(endpoint)
    names = ["model", "temperature", "stop", "stream", "stream_options", "tools", "n", "logprobs"]
    assert parsed(endpoint, **dict.fromkeys([*names, *NEUTRAL[endpoint]])) == bare
    assert (bare.num_choices_each, bare.stream, bare.num_choices) == (1, False, 1)
    limit = 16 if endpoint == "completions" else 500
    assert bare.options == {"temperature": 1.0, "max_new_tokens": limit}


@pytest.mark.parametrize("endpoint", PARSERS)
def test_unsupported_value_error_names_the_field(endpoint):
    for name in NEUTRAL[endpoint]:
        assert parsed(endpoint, **{name: {"a": 1}}) == parsed(endpoint)
    for name, values in UNSUPPORTED_FIELDS[endpoint].items():
        for value in values:
            assert parsed(endpoint, **{name: value}) == parsed(endpoint)
        with pytest.raises(ApiError, match=rf"^{name} is not supported") as caught:
            parsed(endpoint, **{name: {"a": [1]}})
        assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize("endpoint", PARSERS)
def test_beam_search_is_refused_with_the_reason(endpoint):
    with pytest.raises(ApiError, match=r"num_beams .* got 4; .* or be 1, since a text is decoded"):
        parsed(endpoint, num_beams=4)
    with pytest.raises(TypeError, match="'num_beams' is not supported: a text is decoded"):
        build_request(num_beams=4)


@pytest.mark.parametrize("endpoint", PARSERS)
def test_speculative_sets_drafter_and_draft_tokens(endpoint):
    def drafting(**speculative):
        found = options(endpoint, speculative=speculative)
        return found.get("drafter"), found.get("num_draft_tokens")

    assert drafting(drafter="chain", num_draft_tokens=3) == ("chain", 3)
    assert drafting(off=True) == (None, 0)
    assert drafting(off=False, drafter=None) == (None, None)
    assert drafting(num_draft_tokens="auto") == (None, "auto")
    for wrong in ({"off": True, "drafter": "model"}, {"drafter": 3}, {"num_draft_tokens": True}):
        with pytest.raises(ApiError, match=r"^speculative") as caught:
            drafting(**wrong)
        assert caught.value.param.startswith("speculative.")


def test_options_are_passed_to_the_pipeline():
    fields = {
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
    found = options(max_tokens=10, **fields)
    assert found == fields | {"max_new_tokens": 10}
    assert GenerationRequest(**found).seed == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"max_tokens": -1}, {"max_new_tokens": 500}),
        ({"max_tokens": 24.0}, {"max_new_tokens": 24}),
        ({"n_predict": 7}, {"max_new_tokens": 7}),
        ({"n_predict": -1}, {"max_new_tokens": 500}),
        ({"seed": -1}, {}),
        ({"seed": 3.0}, {"seed": 3}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1.0, "temperature": 0}),
        ({"min_p": -1}, {"min_p": 0.0}),
        ({"stop": ""}, {"stop": []}),
        ({"stop": ["a", ""]}, {"stop": ["a"]}),
        ({"logit_bias": {}}, {}),
        ({"logit_bias": [[5, 1.5], [6, False]]}, {"logit_bias": {5: 1.5, 6: -100.0}}),
        ({"guided_json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", 'b"']}, {"grammar": 'start: "a" | "b\\""'}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"choice": ["a"]}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object", "a": 1}}},
            {"json_schema": {"type": "object", "a": 1}},
        ),
        ({"regex": ""}, {}),
    ],
)
def test_field_aliases_of_other_servers_are_supported(fields, expected):
    bare = {"temperature": 1.0, "max_new_tokens": 16}
    assert options(**fields) == bare | expected


def test_gbnf_grammar_is_converted_to_lark():
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    grammar = options(grammar='root ::= "a" | "b"')["grammar"]
    assert "start" in grammar
    with pytest.raises(ApiError, match="not valid GBNF") as caught:
        options(grammar="root ::= (")
    assert caught.value.param == "grammar"


def test_output_rules_are_parsed():
    rules = parsed(
        "chat",
        stop_token_ids=[5, 6],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logit_bias={"Hello": 2, "7": 1},
    ).rules
    assert (rules.stop_tokens, rules.include_stop, rules.show_special) == ((5, 6), True, True)
    assert rules.text_biases == (("Hello", 2.0),)
    with pytest.raises(ApiError, match="stop_token_ids must be a list of token ids"):
        parsed("chat", stop_token_ids=["a"])


UNKNOWN = [
    ("chat", {"chat_id": "a", "min_tokenz": 1}, ("chat_id", "min_tokenz")),
    ("chat", {"messages": [{"role": "user", "content": "a", "id": 7, "opts": {}}] * 2},
     ("messages[].opts",)),
    ("chat", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "x", "cache_control": {}}]}]},
     ("messages[].content[].cache_control",)),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "colour": 1}, "x": 1}]},
     ("tools[].x", "tools[].function.colour")),
    ("chat", {"stream": True, "stream_options": {"usage": True}}, ("stream_options.usage",)),
    ("completions", {"speculative": {"of": True}}, ("speculative.of",)),
    ("responses", {"input": [{"role": "user", "content": "a"}, {"type": "web_search_call"}]},
     ("input[].web_search_call",)),
    ("chat", {"a\r\nSet-Cookie: b": 1, "é" * 200: 1}, None),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "fields", "names"), UNKNOWN)
def test_unknown_field_is_ignored_and_rejected_in_strict_mode(endpoint, fields, names):
    ignored = parsed(endpoint, **fields).ignored
    if names is None:
        assert all(name.isascii() and name.isprintable() and len(name) <= 80 for name in ignored)
        assert len(ignored) == 2
    else:
        assert ignored == names
    with pytest.raises(ApiError) as caught:
        parsed(endpoint, strict=True, **fields)
    assert caught.value.status == 400


def test_number_of_ignored_field_names_is_limited():
    assert len(parsed("chat", **{f"field{i}": i for i in range(500)}).ignored) == 32


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": []}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": []}]},
        {"messages": [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": ""}]},
    ],
)
def test_content_may_be_empty(fields):
    messages = parsed("chat", **fields).prompts[0]
    assert [message["content"] for message in messages] == ["a", ""]
    assert "tool_calls" not in messages[1]


def test_reasoning_of_history_is_kept():
    for fields in ({"reasoning_content": "2+2"}, {"reasoning": "2+2"}, {"content": [
        {"type": "thinking", "thinking": "2+2"}, {"type": "text", "text": "4"}]}):  # fmt: skip
        message = {"role": "assistant", "content": "4"} | fields
        (found,) = parsed("chat", messages=[message]).prompts[0]
        assert found == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x",
         "content": [{"type": "reasoning_text", "text": "2+2"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c",
         "output": [{"type": "input_text", "text": "4"}]},
    ]  # fmt: skip
    request = parsed("responses", input=items)
    assert request.prompts[0][1]["reasoning_content"] == "2+2"
    assert request.prompts[0][2]["content"] == "4"
    assert request.ignored == ()


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low"},
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        ({"think": False}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
    ],
)
def test_reasoning_fields_of_several_apis_are_supported(fields, variables):
    assert parsed("chat", **fields).template.variables == variables


def test_reasoning_of_the_responses_api_sets_the_effort():
    reasoning = {"effort": "medium", "summary": "auto"}
    assert (
        parsed("responses", reasoning=reasoning).template.variables["reasoning_effort"] == "medium"
    )
    assert parsed("responses", reasoning={"summary": "auto"}).ignored == ()


def test_sse_event_contains_no_line_separators():
    found = sse_event({"text": "a\u2028b\x85c\u2029"})
    assert len(found.splitlines()) == 2
    assert json.loads(found.removeprefix("data: ")) == {"text": "a\u2028b\x85c\u2029"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
        ({"coupling": "maximal"}, "coupling must be residual or gumbel"),
        ({"coupling": ["gumbel"]}, "coupling must be residual or gumbel"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"min_new_tokens": 20}, "min_new_tokens 20 is above max_tokens 5"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {"a": 101}}, "logit_bias must have numbers from -100 to 100"),
        ({"prompt": {"a": 1}}, "prompt must be text, token ids, or a list of either"),
        ({"prompt": []}, "prompt must be text, token ids, or a list of either"),
        ({"prompt": [1, True]}, "prompt must be text, token ids, or a list of either"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"model": 3}, "model must be a name, got 3"),
        ({"stop": ["a"] * 1025}, "stop must have at most 1024 entries, got 1025"),
        ({"bad_words": [[1]] * 1025}, "bad_words must have at most 1024 entries"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias must have at most 1024"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must not be 0"),
        ({"max_tokens": 0}, "max_tokens must be"),
    ],
)
def test_invalid_value_is_reported_with_its_field(change, message):
    with pytest.raises(ApiError) as caught:
        parsed("completions", **{"max_tokens": 5} | change)
    assert message in caught.value.message
    assert caught.value.param.partition(".")[0] in change


def test_arguments_of_earlier_calls_are_objects_or_text():
    for given, expected in [
        ({"arguments": ""}, {}), ({"arguments": "{}"}, {}), ({}, {}), ({"arguments": None}, {}),
        ({"arguments": '{"a": 1}'}, {"a": 1}), ({"arguments": '{"city'}, '{"city'),
        ({"arguments": "[1]"}, "[1]"),
    ]:  # fmt: skip
        call = {"id": "a", "type": "function", "function": {"name": "clock"} | given}
        request = parsed("chat", messages=[{"role": "assistant", "tool_calls": [call]}])
        assert request.prompts[0][0]["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": -5},
        {"min_tokens": True},
        {"repeat_penalty": -2},
        {"guided_json": "{"},
        {"guided_grammar": "root ::= (("},
        {"guided_regex": "x" * 70_000},
        {"structured_outputs": {"grammar": "root ::= (("}},
        {"n_predict": 0},
    ],
)
def test_error_names_the_field_that_was_sent(fields):
    (name,) = fields
    with pytest.raises(ApiError, match=rf"^{name}\b") as caught:
        options(**fields)
    assert caught.value.param == name
