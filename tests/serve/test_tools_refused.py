"""Requests with tools that cannot be: each is one error that names the field."""

import openai
import pytest

from served import MODEL, client, serving
from tool_pairs import tool_pair
from tool_templates import CLOCK, WEATHER

MESSAGES = [{"role": "user", "content": "Is it hot?"}]
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 9, "tools": TOOLS}


@pytest.fixture(scope="module")
def ai():
    with serving(tool_pair("Qwen"), model=MODEL) as port, client(port) as found:
        yield found


NESTED = {}
for _ in range(300):
    NESTED = {"properties": {"a": NESTED}}
DEEP = [{"type": "function", "function": CLOCK | {"parameters": NESTED}}]
BAD = [
    ({"tools": [{"type": "function", "function": 3}]}, "tools[0].function"),
    ({"tools": ["clock"]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
    ({"tools": TOOLS[:1] * 129}, "tools"),
    (
        {"tools": [{"type": "function", "function": CLOCK | {"parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": DEEP, "tool_choice": "required"}, "tools"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function", "function": {"name": "rain"}}}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"extra_body": {"ignore_eos": True}, "tool_choice": "required"}, "tools"),
    (
        {
            "tools": [{"type": "function", "function": CLOCK | {"parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}]},
        "messages[0].tool_calls[0].name",
    ),
    ({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "a", "content": "b"}]},
     "messages[1].tool_call_id"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), BAD)
def test_invalid_tool_field_is_a_400_error_with_param(ai, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(**ASKED | change)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
