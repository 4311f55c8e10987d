"""The Responses API as Codex, the agents SDK and other clients use it."""

import json

import openai
import pytest
from test_thinking import CALLING, TOKENS

from served import MODEL, ask, client, serving
from specedge.serve import response_store
from specedge.serve.response_store import ResponseStore, StoredResponse
from tool_pairs import scripted_pair

TOOL = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
# The fields that Codex sends.
CODEX = {
    "model": "gpt-5-codex",
    "instructions": "You are a coding agent.",
    "tools": [
        TOOL,
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "mcp", "tools": []},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"session": "b"},
    "text": {"verbosity": "low"},
}
# Those of Home Assistant 2026.11.0 (integration openai_conversation) for a reasoning model.
HOME_ASSISTANT = {
    "model": "gpt-5-mini",
    "max_output_tokens": 3000,
    "tools": [TOOL, {"type": "web_search", "search_context_size": "medium"}],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"verbosity": "medium"},
    "service_tier": "auto",
    "store": False,
    "stream": True,
    "safety_identifier": "01KB0ZC4T9V7K1Q3W5X7Y9ZA2B",
    "prompt_cache_key": "01KB0Z8M3N5P7R9S1T3V5X7Z9B",
    "prompt_cache_retention": "24h",
}


@pytest.fixture(scope="module")
def served():
    pipeline = scripted_pair(CALLING, TOKENS)
    with serving(pipeline, model=MODEL) as port, client(port) as ai:
        yield pipeline, ai, port


@pytest.mark.parametrize("fields", [CODEX, HOME_ASSISTANT], ids=["Codex", "Home Assistant"])
def test_agent_session_with_reasoning_and_tool_call(served, fields):
    pipeline, ai, _ = served
    pipeline.text = f"<think>\nLook.\n</think>\n\n{CALL}"
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}
    body = {k: v for k, v in fields.items() if k != "client_metadata"}
    extra = {"client_metadata": fields.get("client_metadata")}
    events = list(ai.responses.create(input=[user], extra_body=extra, **body))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == ["reasoning", "function_call"]
    assert json.loads(done[1].arguments) == {"command": "ls"}
    names = [event.type for event in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # The clients send back what they keep of the items.
    reasoning = {"type": "reasoning", "summary": [], "content": None,
                 "encrypted_content": done[0].encrypted_content}  # fmt: skip
    call = {"type": "function_call", "name": "shell", "arguments": done[1].arguments,
            "call_id": done[1].call_id}  # fmt: skip
    output = {"type": "function_call_output", "call_id": done[1].call_id, "output": "a.py"}
    pipeline.text = "There is a.py."
    events = list(ai.responses.create(input=[user, reasoning, call, output], **body))
    assert events[-1].response.output_text == "There is a.py."
    prompt = pipeline.asked_text
    assert ("<think>\nLook.\n</think>" in prompt) == ("include" in fields)
    assert "a.py" in prompt


def test_ignored_tools_are_listed_in_header(served):
    pipeline, _, port = served
    pipeline.text = "Yes."
    body = CODEX | {"input": "Go.", "stream": False}
    status, headers, _ = ask(port, "POST", "/v1/responses", body)
    assert status == 200
    assert headers["x-specedge-ignored"] == (
        "model, tools[].web_search, tools[].namespace, tools[].custom"
    )


def test_previous_response_is_continued_while_stored(served):
    pipeline, ai, _ = served
    pipeline.text = "Four."
    first = ai.responses.create(model=MODEL, input="2+2?", instructions="Be brief.")
    assert first.store is True
    pipeline.text = "Eight."
    second = ai.responses.create(model=MODEL, input="Twice?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert (first.id[:5], first.output[0].id[:4]) == ("resp_", "msg_")  # LangChain looks at both
    prompt = pipeline.asked_text
    assert [prompt.count(text) for text in ("2+2?", "Four.", "Twice?", "Be brief.")] == [1, 1, 1, 0]
    assert ai.responses.retrieve(second.id).output_text == "Eight."
    ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="is not stored") as caught:
        ai.responses.create(model=MODEL, input="a", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"
    kept = ai.responses.create(model=MODEL, input="a", store=False)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(kept.id)


def test_function_call_outputs_refer_to_previous_response(served):
    pipeline, ai, _ = served
    pipeline.text = CALL + CALL
    first = ai.responses.create(model=MODEL, input="Go.", tools=[TOOL])
    assert [item.type for item in first.output] == ["function_call"] * 2
    pipeline.text = "Done."
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"file{i}"}
        for i, item in enumerate(first.output)
    ]
    ai.responses.create(model=MODEL, input=outputs, previous_response_id=first.id, tools=[TOOL])
    prompt = pipeline.asked_text
    assert prompt.index("file0") < prompt.index("file1")


def test_references_to_items_are_resolved(served):
    pipeline, ai, port = served
    pipeline.text = "Four."
    first = ai.responses.create(model=MODEL, input="2+2?")
    reference = {"type": "item_reference", "id": first.output[0].id}
    pipeline.text = "Eight."
    items = [{"role": "user", "content": "2+2?"}, reference, {"role": "user", "content": "Twice?"}]
    assert ai.responses.create(model=MODEL, input=items).output_text == "Eight."
    assert "assistant\nFour." in pipeline.asked_text
    body = {"input": [{"type": "item_reference", "id": "msg-none"}]}
    status, _, text = ask(port, "POST", "/v1/responses", body)
    assert (status, json.loads(text)["error"]["code"]) == (404, "item_not_found")


def test_store_is_bounded(monkeypatch):
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    monkeypatch.setattr(response_store, "MAX_CHARACTERS", 1000)
    store = ResponseStore()
    for i in range(5):
        store.add(StoredResponse({"id": str(i), "output": []}, []))
    assert [store.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    store.add(StoredResponse({"id": "long", "output": [], "text": "x" * 950}, []))
    assert store.get("4") is None
    assert store.get("long") is not None
    store.add(StoredResponse({"id": "longer", "output": [], "text": "x" * 2000}, []))
    assert store.get("longer") is None
    assert not store.remove("longer")
