"""Invalid requests of the official OpenAI client and their errors."""

import openai
import pytest

from served import MODEL, chat_pair, client, serving

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "A class."}], "max_tokens": 24}


@pytest.fixture(scope="module")
def ai():
    with serving(chat_pair(1), timeout=60) as port, client(port) as found:
        yield found


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"seed": True}, "seed"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"n": 17}, "n"),
        ({"stop": [3]}, "stop"),
        ({"extra_body": {"speculative": {"drafter": "ngram:/etc/passwd"}}}, "speculative.drafter"),
        ({"extra_body": {"speculative": {"num_draft_tokens": 99}}}, "speculative.num_draft_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"extra_body": {"regex": "(a"}}, "regex"),
        ({"extra_body": {"regex": "a" * 2**17}}, "regex"),
        ({"extra_body": {"regex": "a", "ignore_eos": True}}, "regex"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"bad_words": [[99999]]}}, "bad_words"),
        ({"extra_body": {"min_new_tokens": 99}}, "min_new_tokens"),
        ({"extra_body": {"regex": "a", "grammar": 'start: "a"'}}, "grammar"),
        ({"extra_body": {"json_schema": {"type": "x"}}}, "json_schema"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_invalid_field_is_a_400_error_with_param(ai, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(**(CHAT | change))
    assert caught.value.param == param
    assert param.split(".")[-1].partition("[")[0] in str(caught.value)
    assert caught.value.type == "invalid_request_error"


def test_too_long_prompt_is_context_length_exceeded(ai):
    with pytest.raises(openai.BadRequestError) as caught:
        ai.completions.create(prompt=[7] * 512, model=MODEL, max_tokens=24)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
