"""Anthropic's Messages API, through its official client and by hand."""

import json

import pytest
from test_thinking import CALLING, TOKENS

from served import MODEL, ask, serving
from tool_pairs import scripted_pair

WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rom", "Bonn"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "cache_control": {"type": "ephemeral"},
}
ASKED = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": "Hot?"}]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'


@pytest.fixture(scope="module")
def served():
    anthropic = pytest.importorskip("anthropic", reason="needs the test extra")
    pipeline = scripted_pair(CALLING, TOKENS)
    with (
        serving(pipeline, model=MODEL) as port,
        anthropic.Anthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="k", max_retries=0, timeout=60
        ) as client,
    ):
        yield pipeline, client, port


def test_message_contains_text_usage_and_stop_reason(served):
    pipeline, client, _ = served
    pipeline.text = "It is hot. END more"
    system = [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
              {"type": "text", "text": "kind."}]  # fmt: skip
    found = client.messages.create(system=system, stop_sequences=["END"], **ASKED)
    assert [block.text for block in found.content] == ["It is hot. "]
    assert (found.role, found.stop_reason, found.stop_sequence) == (
        "assistant", "stop_sequence", "END",
    )  # fmt: skip
    assert found.usage.output_tokens > 2
    assert "system\nBe kind." in pipeline.asked_text
    pipeline.text = "Yes."
    assert client.messages.create(**ASKED).stop_reason == "end_turn"
    assert client.messages.create(**ASKED | {"max_tokens": 1}).stop_reason == "max_tokens"


def test_stream_joins_to_the_message(served):
    pipeline, client, _ = served
    pipeline.text = "<think>\nHm, hot.\n</think>\n\nYes, it is." + CALL
    with client.messages.stream(tools=[WEATHER], **ASKED) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[0].thinking == "Hm, hot."
    assert final.content[1].text == "Yes, it is."
    assert (final.content[2].name, final.content[2].input) == ("weather", {"city": "Rom"})
    assert final.stop_reason == "tool_use"
    assert names[0] == "message_start"
    assert names[-1] == "message_stop"
    whole = client.messages.create(tools=[WEATHER], **ASKED)
    for streamed, block in zip(final.content, whole.content, strict=True):
        ids = {"id", "parsed_output", "citations"}
        assert streamed.model_dump(exclude=ids) == block.model_dump(exclude=ids)


def test_tool_choice_forces_call_and_results_are_rendered(served):
    pipeline, client, _ = served
    pipeline.text = None
    asked = ASKED | {"tools": [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]}
    thinking = {"type": "disabled"}
    choice = {"type": "tool", "name": "weather"}
    found = client.messages.create(tool_choice=choice, thinking=thinking, **asked)
    (block,) = found.content
    assert block.input["city"] in ("Rom", "Bonn")
    result = {"type": "tool_result", "tool_use_id": block.id,
              "content": [{"type": "text", "text": "31 degrees"}]}  # fmt: skip
    messages = [
        *ASKED["messages"],
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""},
                                          block.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]  # fmt: skip
    pipeline.text = "Yes."
    answer = client.messages.create(**asked | {"messages": messages})
    assert answer.content[0].text == "Yes."
    prompt = pipeline.asked_text
    assert "<think>\nHm.\n</think>" in prompt
    assert "31 degrees" in prompt
    assert "So?" in prompt.partition("31 degrees")[2]


def test_tool_runner_calls_the_function_and_ends(served):
    from anthropic import beta_tool

    pipeline, client, _ = served
    pipeline.text = CALL
    cities = []

    @beta_tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        cities.append(city)
        pipeline.text = "It is hot."
        return "31"

    message = client.beta.messages.tool_runner(tools=[weather], **ASKED).until_done()
    assert (cities, message.content[0].text) == (["Rom"], "It is hot.")


def test_count_tokens_equals_usage(served):
    pipeline, client, _ = served
    pipeline.text = "Yes."
    asked = {"model": MODEL, "messages": ASKED["messages"], "tools": [WEATHER]}
    count = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(max_tokens=5, **asked).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_have_anthropic_format(served):
    from anthropic import BadRequestError  # a second to import, for the worker that needs it

    _, client, port = served
    with pytest.raises(BadRequestError) as caught:
        client.messages.create(extra_body={"temperature": -1}, **ASKED)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    for messages in ("x", [], [{"role": "user", "content": [{"type": "image"}]}], [3]):
        body = ASKED | {"messages": messages}
        status, _, text = ask(port, "POST", "/v1/messages", body)
        assert (status, json.loads(text)["type"]) == (400, "error")


def test_server_side_threads_are_rejected_as_unsupported(served):
    _, _, port = served
    status, _, text = ask(port, "POST", "/v1/messages", ASKED | {"thread": {"type": "create"}})
    error = json.loads(text)["error"]
    assert status == 400
    assert error["details"] == {
        "error_code": "thread_unsupported_request", "unsupported": ["thread"],
    }  # fmt: skip
    assert "thread" in error["message"]


def test_ignored_fields_and_tools_are_listed_in_header(served):
    pipeline, _, port = served
    pipeline.text = "Yes."
    tools = [WEATHER, {"type": "bash_20250124", "name": "bash"}]
    body = ASKED | {"tools": tools, "mcp_servers": [], "stream": False}
    status, headers, _ = ask(port, "POST", "/v1/messages", body)
    assert status == 200
    assert headers["x-specedge-ignored"] == "tools[].bash_20250124, mcp_servers"
