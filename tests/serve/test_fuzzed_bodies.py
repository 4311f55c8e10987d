"""Fuzzed bodies on every path: a request is parsed or refused, and never fails otherwise."""

import copy
import json
import random

import pytest

from specedge.serve import anthropic, requests
from specedge.serve.errors import ApiError
from specedge.serve.fields import NEUTRAL, OPTIONS, UNSUPPORTED_FIELDS
from specedge.serve.requests import ParserSettings
from specedge.serve.response_store import ResponseStore

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
PART = {"type": "text", "text": "a", "cache_control": {}}
CHAT = {
    "messages": [
        {"role": "system", "content": [PART]},
        {"role": "user", "content": "a", "name": "b"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "c"},
        {"role": "tool", "tool_call_id": "a", "content": [PART]},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "chat_template_kwargs": {"a": 1},
    "documents": [{"title": "a"}],
    "logit_bias": [["a", 1], [3, False]],
    "speculative": {"drafter": "suffix"},
    "structured_outputs": {"choice": ["a"]},
    "reasoning": {"effort": "low"},
    "max_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["a"],
    "stop_token_ids": [1],
}
COMPLETION = {
    "prompt": ["a", [1, 2]], "echo": True, "max_tokens": 0, "logprobs": 1, "prompt_logprobs": 1,
    "grammar": 'root ::= "a"', "guided_choice": ["a"], "truncate_prompt_tokens": 3,
    "response_format": {"type": "json_object", "schema": {}}, "n": 2,
}  # fmt: skip
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "specedge:!", "content": [PART]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"},
        {"type": "function_call_output", "call_id": "a", "output": [PART]},
        {"type": "item_reference", "id": "a"},
        {"type": "web_search_call"},
    ],
    "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "previous_response_id": "a",
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 5,
}
MESSAGE = {
    "system": [PART],
    "messages": [
        {"role": "user", "content": [PART, {"type": "tool_result", "tool_use_id": "a"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}},
                                          {"type": "thinking", "thinking": "a"}]},
    ],
    "tools": [{"name": "f", "input_schema": {}}, {"type": "bash_1"}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled"},
    "stop_sequences": ["a"],
    "max_tokens": 5,
}  # fmt: skip
PATHS = {
    "chat": (requests.parse_chat, CHAT),
    "completions": (requests.parse_completion, COMPLETION),
    "responses": (requests.parse_response, RESPONSE),
    "messages": (anthropic.parse_message_request, MESSAGE),
    "tokenize": (requests.parse_tokenize, {"prompt": "a", "messages": CHAT["messages"]}),
    "detokenize": (requests.parse_detokenize, {"tokens": [1, 2]}),
}
VALUES = [
    None, True, False, 0, -1, 1.5, 1e308, 2**70, "", "a", "\u2028", "none", [], [[]], [None], [1],
    ["a"], [{}], {}, {"type": "text"}, {"a": {"b": []}}, "x" * 300, [[1, 2, 3]], {"type": []},
]  # fmt: skip


def nodes(value, path=()):
    """Yield the path of every value within a value."""
    yield path
    items = value.items() if isinstance(value, dict) else []
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        yield from nodes(item, (*path, key))


def refusal(parse, body, settings):
    """Return the error of a body, None if it is parsed."""
    try:
        parse(body, settings)
    except ApiError as error:
        return error
    return None


def mutated(body, rng):
    """Return a copy of a body with a few values replaced, removed or added."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        path = rng.choice([path for path in nodes(body) if path] or [("zzz",)])
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        change = rng.random()
        if change < 0.7:
            parent[path[-1]] = copy.deepcopy(rng.choice(VALUES))
        elif change < 0.85:
            parent.pop(path[-1], None) if isinstance(parent, dict) else parent.pop(path[-1])
        elif isinstance(parent, dict):
            names = [*OPTIONS, *NEUTRAL["chat"], *UNSUPPORTED_FIELDS["responses"], "zzz"]
            parent[rng.choice(names)] = copy.deepcopy(rng.choice(VALUES))
    return body


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_fuzzed_body_is_parsed_or_refused(path, strict):
    parse, body = PATHS[path]
    settings = ParserSettings(500, strict=strict, store=ResponseStore())
    rng = random.Random(7)
    bodies = [mutated(body, rng) for _ in range(300)]
    errors = [(refusal(parse, fuzzed, settings), fuzzed) for fuzzed in bodies]
    refused = [(error, fuzzed) for error, fuzzed in errors if error is not None]
    assert refused
    for error, fuzzed in refused:
        assert error.status in (400, 404), fuzzed
        assert len(error.message) < 600, fuzzed
    for value in VALUES:
        if not isinstance(value, dict):
            with pytest.raises(ApiError):
                parse(value, settings)
