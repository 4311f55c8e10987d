"""The official OpenAI client against a server of a random pair that chats."""

import json

import pytest

openai = pytest.importorskip("openai", reason="needs the test extra")
pytest.importorskip("uvicorn", reason="needs the serve extra")
pytest.importorskip("llguidance", reason="needs the grammar extra")

from expected_answers import LENGTH, MESSAGES, MODEL, SCHEMA, TOOL, random_pair, wanted  # noqa: E402

from served import chat_pair, client, health, serving, until  # noqa: E402
from tool_templates import QWEN  # noqa: E402

pytestmark = [pytest.mark.slow]

GREEDY = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": LENGTH}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def alone(folder):
    return wanted(chat_pair(1, folder, QWEN))


@pytest.fixture(scope="module")
def port(folder):
    with serving(chat_pair(2, folder, QWEN), model=MODEL, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def ai(port):
    with client(port) as found:
        yield found


def test_a_chat_whole_and_streamed_is_what_the_pipeline_answers(ai, alone):
    whole = ai.chat.completions.create(**GREEDY).choices[0]
    assert (whole.message.content, whole.finish_reason) == (alone["text"], "length")
    chunks = ai.chat.completions.create(stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone["text"]


def test_an_answer_follows_its_schema(ai, alone):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    asked = GREEDY | {"max_tokens": 100, "response_format": form}
    choice = ai.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == (alone["json"], "stop")
    assert list(json.loads(choice.message.content)) == ["name", "age"]


def test_a_function_is_called_whole_and_streamed(ai):
    asked = GREEDY | {"max_tokens": 100, "tools": [{"type": "function", "function": TOOL}]}
    asked["tool_choice"] = {"type": "function", "function": {"name": "weather"}}
    choice = ai.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.finish_reason) == ("weather", "tool_calls")
    assert list(json.loads(call.function.arguments)) == ["city", "days"]
    chunks = list(ai.chat.completions.create(stream=True, **asked))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_log_probabilities_are_the_pipelines(ai, alone):
    found = ai.chat.completions.create(logprobs=True, top_logprobs=3, **GREEDY).choices[0].logprobs
    assert [one.logprob for one in found.content] == alone["logprobs"]


def test_a_field_that_cannot_be_is_named(ai):
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(**(GREEDY | {"temperature": -1}))
    assert caught.value.param == "temperature"


def test_a_client_that_leaves_its_stream_frees_the_slot(ai, port):
    own = {"speculative": {"off": True}, "ignore_eos": True}
    long = GREEDY | {"max_tokens": 400, "n": 8, "extra_body": own}
    stream = ai.chat.completions.create(stream=True, **long)
    next(iter(stream))
    assert health(port)["running"] > 0
    stream.close()
    until(lambda: health(port)["running"] == 0)
