"""Bodies near the limit cost no more than their size, and are not repeated in errors."""

import sys

import pytest

from specedge.serve import requests
from specedge.serve.errors import ApiError
from specedge.serve.messages import parse_messages
from specedge.serve.requests import ParserSettings

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "x"},
]
ITEMS = [
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
]


def count_calls(function):
    """Count what a function calls."""
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(1) if "call" in event else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize(("where", "messages"), [("messages", CHAT), ("input", ITEMS)])
@pytest.mark.parametrize("repeated", [slice(None), slice(1, None)])
def test_message_parsing_time_is_linear(where, messages, repeated):
    def read(count):
        return lambda: parse_messages([*messages, *(messages[repeated] * count)], where)

    assert count_calls(read(400)) < 2.5 * count_calls(read(200))


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_k", "seed", "min_new_tokens", "logit_bias", "bad_words", "stop", "regex"],
)
@pytest.mark.parametrize("value", ["x" * 10**5, [["x"] * 10**5], {"x" * 10**5: 1}])
def test_an_error_does_not_repeat_a_long_value(name, value):
    message = error_of({"prompt": "a", name: value})
    assert len(message) < 500
    assert "x" * 100 not in message


def test_total_length_of_bad_words_is_limited():
    """Their tokens are made before a text begins, in a thread that others wait for."""
    words = ["w" * 640] * 100
    assert not error_of({"prompt": "a", "bad_words": words})
    assert "bad_words must have at most 65536 characters" in error_of(
        {"prompt": "a", "bad_words": [*words, *words]}
    )


def error_of(body):
    """Return the error that a body gets, empty where it is valid."""
    try:
        requests.parse_completion(body, ParserSettings(512))
    except ApiError as error:
        return error.message
    return ""
