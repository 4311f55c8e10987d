"""Requests of real clients, and reports of other servers' users: each has the right answer."""

import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from served import MODEL, PROMPT, ask, health, serving, until
from templates import CHATML
from tool_pairs import scripted_pair

MARKS = {"<|im_start|>": True, "<|im_end|>": True, "<tool_call>": True, "</tool_call>": True}
USER = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city'}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "none"}


@pytest.fixture(scope="module")
def pair():
    return scripted_pair(CHATML, MARKS, slots=2)


@pytest.fixture(scope="module")
def port(pair):
    with serving(pair, model=MODEL) as port:
        yield port


def post(port, path, body):
    status, headers, answer = ask(port, "POST", f"/v1/{path}", {"max_tokens": 2} | body)
    return status, headers, json.loads(answer)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"messages": [USER, {"role": "assistant", "content": "y", "annotations": []}, USER]},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_id": "a", "messages": [USER | {"id": 7, "opts": {}}]},
        {"min_tokens": 0, "stop_token_ids": [], "skip_special_tokens": True, "repeat_penalty": 1.0},
        {"prompt_cache_retention": "24h", "cache_prompt": True, "verbosity": "low", "store": True},
        {"think": False, "enable_thinking": False, "reasoning_effort": "low"},
        {"response_format": {"type": "json_object"}, "tools": [FUNCTION]},
        {"tools": [FUNCTION], "tool_choice": "auto"},
        {"tools": [{"type": "web_search"}, {"type": "custom", "custom": {"name": "a"}}]},
        {"tools": [{"function": {"name": "f", "description": None}}], "parallel_tool_calls": None},
        {"messages": [USER, {"role": "assistant", "content": None}, USER]},
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER]},
        {"messages": [USER, {"role": "assistant", "content": []}, USER]},
        {"messages": [USER, {"role": "assistant"}, USER]},
        {"messages": [{"role": "system", "content": ""}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]},
        {"messages": [{"role": "developer", "content": "x"}, USER | {"name": "Ann"}]},
        {"max_tokens": 2.0, "top_p": 0, "top_k": -1, "seed": -1, "min_p": 0, "stop": ""},
        {"temperature": 0, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}},
        {"options": {"num_ctx": 4096}, "keep_alive": "5m", "format": "", "mirostat": 0},
    ],
)  # fmt: skip
def test_chat_requests_of_known_clients_succeed(port, pair, fields):
    pair.text = None
    status, _, answer = post(port, "chat/completions", {"messages": [USER]} | fields)
    assert status == 200, answer
    assert answer["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"summary": "auto"}},
        {"reasoning": {"effort": "medium", "summary": "auto"}},
        {"include": ["reasoning.encrypted_content"]},
        {"client_metadata": {}, "prompt_cache_key": "a", "truncation": "auto", "store": True},
        {"tools": [{"type": "web_search"}, {"type": "namespace", "name": "a"}]},
        {"input": [USER, {"type": "reasoning", "id": "rs_1", "summary": []}, USER]},
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required",
         "text": {"format": {"type": "json_object"}}},
    ],
)  # fmt: skip
def test_responses_requests_of_known_clients_succeed(port, pair, fields):
    pair.text = None
    body = {"input": "x", "max_output_tokens": 20} | fields
    status, _, answer = post(port, "responses", body)
    assert status == 200, answer
    assert answer["output"]


def test_requests_of_open_webui_have_no_ignored_fields(port, pair):
    """Requests of Open WebUI 0.12.4: a chat with all of its settings, and a continued answer."""
    pair.text = None
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7,
                "frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["\n\n"],
                "logit_bias": {"5": -100}, "reasoning_effort": "low"}  # fmt: skip
    chat = {"messages": [USER], "tools": [FUNCTION], **settings}
    cut = [USER, {"role": "assistant", "content": "One, two,"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    text = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    for path, body in (
        ("chat/completions", chat),
        ("chat/completions", {"messages": cut, **flags}),
        ("responses", {"input": [text], "tools": [tool], "instructions": "Be brief."}),
    ):
        limit = {"max_output_tokens": 2} if path == "responses" else {"max_tokens": 2}
        fields = {"model": MODEL, **limit, **body}
        status, headers, answer = ask(port, "POST", f"/v1/{path}", fields)
        assert (status, headers.get("x-specedge-ignored")) == (200, None), answer


def test_paths_without_v1_are_served_and_unknown_paths_rejected(port):
    for path in ("/models", f"/models/{MODEL}", "/v1/models"):
        assert ask(port, "GET", path)[0] == 200
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert ask(port, "POST", "/completions", body)[0] == 200
    for path in ("/chat/completions", "/responses"):
        status, _, answer = ask(port, "POST", path, {})
        assert (status, json.loads(answer)["error"]["type"]) == (400, "invalid_request_error")
    for path in ("/v1/embeddings", "/v1/audio/speech", "/api/chat"):
        status, _, answer = ask(port, "POST", path, {"input": "a"})
        assert (status, json.loads(answer)["error"]["code"]) == (404, "not_found")


def test_forced_call_of_a_function_without_parameters_streams_an_object(port, pair):
    pair.text = None
    body = {"messages": [USER], "tools": [FUNCTION], "tool_choice": "required", "stream": True}
    _, _, answer = ask(port, "POST", "/v1/chat/completions", body | {"parallel_tool_calls": False})
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == "{}"
    assert calls[0]["function"]["name"] == "f"


@pytest.mark.parametrize("bias", [{}, {"0": 100}])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_has_logprobs_for_each_token_including_end_token(port, pair, bias, max_tokens):
    """lm-evaluation-harness leaves the last one out, as that of the only new token."""
    pair.text = None
    prompt = [60, 61, 62, 63]
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logit_bias": bias}
    _, _, answer = post(port, "completions", body | {"logprobs": 1, "echo": True})
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(prompt) + max_tokens
    assert len(logprobs["tokens"]) == len(prompt) + max_tokens


def allowed_tools(path, mode, *names):
    """OpenAI's choice among some tools: nested in chats, flat in /v1/responses."""
    if path == "responses":
        tools = [{"type": "function", "name": name} for name in names]
        return {"type": "allowed_tools", "mode": mode, "tools": tools}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
def test_allowed_tools_restrict_the_call(port, pair, path):
    names = ("f", "g", "h")
    functions = [{"type": "function", "name": name} for name in names]
    nested = [{"type": "function", "function": {"name": name}} for name in names]
    body = {"messages": [USER], "tools": nested, "max_tokens": 90}
    if path == "responses":
        body = {"input": "Hi", "tools": functions, "max_output_tokens": 90}

    def called(choice):
        body["tool_choice"] = choice
        status, _, answer = post(port, path, body | {"parallel_tool_calls": False})
        assert status == 200, answer
        if path == "responses":
            return [item["name"] for item in answer["output"] if item["type"] == "function_call"]
        calls = answer["choices"][0]["message"].get("tool_calls", [])
        return [call["function"]["name"] for call in calls]

    pair.text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert called(allowed_tools(path, "auto", "f", "g")) == ["f"]
    assert called(allowed_tools(path, "auto", "g")) == []  # a text, as any unknown function
    assert called(allowed_tools(path, "required", "g")) == ["g"]
    for choice in (allowed_tools(path, "required", "none"), allowed_tools(path, "sometimes", "f"),
                   allowed_tools(path, "auto")):  # fmt: skip
        status, _, answer = post(port, path, body | {"tool_choice": choice})
        assert (status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("value", [1, 12.5, True, [], {"a": "</tool_call>"}, 'a"b\\c</tool_call>'])
def test_call_arguments_are_returned_unmodified(port, pair, value):
    arguments = json.dumps({"a": value})
    pair.text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    body = {"messages": [USER], "tools": [FUNCTION], "max_tokens": 200}
    _, _, answer = post(port, "chat/completions", body)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": value}


def test_immediate_disconnects_free_all_slots(port, pair):
    pair.text = None
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def leave(_):
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            linger = struct.pack("ii", 1, 0)  # closing resets the connection
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.sendall(request)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(100)))
    until(lambda: not (health(port)["running"] or health(port)["waiting"]))
    assert ask(port, "POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})[0] == 200


def test_grammar_is_enforced_against_preferred_end_token(port, pair):
    pair.text = None
    ends = {str(token): 100 for token in pair.bundle.end_tokens}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logit_bias": ends}
    body |= {"json_schema": schema}
    (choice,) = post(port, "completions", body)[2]["choices"]
    jsonschema.validate(json.loads(choice["text"]), schema)
    assert choice["finish_reason"] == "stop"


NESTED = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAGGED = [
    {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
    for name in ("cat", "dog")
]


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/N"}}, {"type": "null"}],
         "default": None},
        {"oneOf": TAGGED, "discriminator": {"propertyName": "kind"}},
        {"const": "a", "enum": ["a"], "title": "Kind", "type": "string"},
        {"type": "string", "format": "date-time", "title": "When"},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9},
        {"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{8}-[0-9a-f-]{27}$"},
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
        {"type": "string", "format": "password", "writeOnly": True},
        {"title": "anything"},
    ],
)  # fmt: skip
def test_pydantic_and_zod_schemas_are_supported(port, pair, schema):
    pair.text = None
    properties = {"a": schema, "x-guidance": {"type": "boolean"}}
    whole = {"$defs": {"N": NESTED}, "type": "object", "properties": properties, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": whole}}
    for fields in ({"tools": [tool], "tool_choice": "required"}, {"response_format": form}):
        status, _, answer = post(port, "chat/completions", {"messages": [USER]} | fields)
        assert status == 200, answer


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"const": 1}}, '"not"'),
        ({"type": "string", "pattern": "^(?=a)"}, "look-around"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ],
)
def test_unsupported_schema_error_names_the_function(port, schema, reason):
    whole = {"type": "object", "properties": {"a": schema}}
    good = {"type": "function", "function": {"name": "good"}}
    tool = {"type": "function", "function": {"name": "bad", "parameters": whole}}
    fields = {"tools": [good, tool], "tool_choice": "required"}
    status, _, answer = post(port, "chat/completions", {"messages": [USER]} | fields)
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "the function 'bad' is rejected" in answer["error"]["message"]
    assert reason in answer["error"]["message"]
    assert "arguments_" not in answer["error"]["message"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": whole}}
    body = {"messages": [USER], "response_format": form}
    status, _, answer = post(port, "chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert reason in answer["error"]["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        },
    ],
)
def test_self_referential_schema_is_rejected_with_its_field(port, schema):
    named = {"name": "n", "schema": schema}
    form = {"type": "json_schema", "json_schema": named}
    function = {"name": "f", "parameters": schema}
    chat_tool = {"type": "function", "function": function}
    chat, response = {"messages": [USER]}, {"input": "x"}
    for path, body, param in [
        ("chat/completions", chat | {"response_format": form}, "response_format"),
        ("chat/completions", chat | {"json_schema": schema}, "json_schema"),
        ("chat/completions", chat | {"guided_json": schema}, "guided_json"),
        ("chat/completions", chat | {"structured_outputs": {"json": schema}}, "structured_outputs"),
        ("completions", {"prompt": "x", "response_format": form}, "response_format"),
        ("responses", response | {"text": {"format": {"type": "json_schema", **named}}}, "text"),
        ("chat/completions", chat | {"tools": [chat_tool]}, "tools"),
        ("responses", response | {"tools": [{"type": "function", **function}]}, "tools"),
    ]:
        body |= {"tool_choice": "required"} if param == "tools" else {}
        status, _, answer = post(port, path, body)
        assert (status, answer["error"]["param"]) == (400, param)
        assert ("function 'f'" if param == "tools" else param) in answer["error"]["message"]
    tool = {"name": "f", "input_schema": schema}
    body = chat | {"max_tokens": 9, "tools": [tool], "tool_choice": {"type": "any"}}
    status, _, answer = post(port, "messages", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "tools: the schema of the function 'f' is rejected" in answer["error"]["message"]


def test_anthropic_assistant_prefill_is_continued(port, pair):
    pair.text = " Four."
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "It is "}]}]
    _, _, answer = post(port, "messages", {"messages": messages, "max_tokens": 20})
    assert answer["content"][0]["text"] == " Four."
    prompt = pair.asked_text
    assert prompt.endswith("<|im_start|>assistant\nIt is")
