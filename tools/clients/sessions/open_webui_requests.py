# client: Open WebUI 0.12.4 (its requests)
# pip: aiohttp==3.14.5
"""Requests of Open WebUI's backend, by the HTTP package that it pins.

Fields, headers and order are those of open-webui/open-webui 0.12.4: `routers/openai.py` sends what
`utils/middleware.py` (chats and tools) and `routers/tasks.py` (follow-ups, title, tags) prepare;
the chat's own fields, such as `chat_id`, `features` and `metadata`, stay with it.
"""

import json

import aiohttp

from steps import TEXT, TOOLS, same, step

HEADERS = {
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "7d1c2c1e-6f0e-4c39-9d3c-0b8a5e0a7c11",
    "X-OpenWebUI-User-Email": "ann@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "3f0d4a57-0d53-4c5e-8c0e-4f6a2b1d9e77",
    "Authorization": "Bearer none",
}
USAGE = {"stream_options": {"include_usage": True}}
DAYS = {"type": "integer", "default": 0, "description": "Number of days to subtract (default: 0)"}
BUILT_IN = [
    {"type": "function", "function": {
        "name": "get_current_timestamp", "description": "Get the current Unix timestamp.",
        "parameters": {"properties": {}, "type": "object"}}},
    {"type": "function", "function": {
        "name": "calculate_timestamp", "description": "Get the timestamp of some days ago.",
        "parameters": {"properties": {"days_ago": DAYS}, "type": "object"}}},
]  # fmt: skip
FOLLOW_UPS = 'Suggest 3-5 next messages.\n### Output:\nJSON format: { "follow_ups": ["1", "2"] }'
TITLE = 'Generate a concise title.\n### Output:\nJSON format: { "title": "your title here" }'
TAGS = 'Generate 1-3 broad tags.\n### Output:\nJSON format: { "tags": ["tag1", "tag2"] }'
CALL = '<tool_call> {"name": "calculate_timestamp", "arguments": {"days_ago": 3}} </tool_call>'


async def get(url):
    async with aiohttp.ClientSession() as session, session.get(url, headers=HEADERS) as response:
        return await response.json()


async def post(url, path, **body):
    """Return the answer to a request: an object, or the events of a stream."""
    async with (
        aiohttp.ClientSession(trust_env=True) as session,
        session.post(f"{url}/v1/{path}", data=json.dumps(body), headers=HEADERS) as response,
    ):
        same(response.status, 200)
        same(response.headers.get("x-specedge-ignored"), None)
        if "text/event-stream" not in response.headers["Content-Type"]:
            return await response.json()
        lines = [line.decode().strip() async for line in response.content]
    events = [line.removeprefix("data: ") for line in lines if line[:6] == "data: "]
    return [json.loads(event) for event in events if event != "[DONE]"]


def text_of(events):
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def user(text):
    return {"role": "user", "content": text}


@step("models")
async def _():
    (model,) = (await get(f"{TEXT}/v1/models"))["data"]
    same(model["id"], "smollm2")


@step("chat with history and built-in tools, streamed")
async def _():
    fields = {"stream": True, "model": "smollm2", **USAGE, "tools": BUILT_IN, "max_tokens": 16}
    events = await post(TEXT, "chat/completions", messages=[user("Hello")], **fields)
    assert events[-1]["usage"]["completion_tokens"]
    answer = {"role": "assistant", "content": text_of(events)}
    messages = [user("Hello"), answer, user([{"type": "text", "text": "And?"}])]
    assert await post(TEXT, "chat/completions", messages=messages, **fields)


@step("chat parameters of its settings")
async def _():
    parameters = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7,
                  "frequency_penalty": 0.1, "presence_penalty": 0.1, "stop": ["\n\n"],
                  "logit_bias": {"5": -100}, "reasoning_effort": "low",
                  "max_tokens": 8}  # fmt: skip
    messages = [{"role": "system", "content": "Be brief."}, user("Hello")]
    fields = {"stream": True, "model": "smollm2", "messages": messages, **USAGE, **parameters}
    assert text_of(await post(TEXT, "chat/completions", **fields))


@step("follow-ups, title and tags")
async def _():
    history = "\n<chat_history>\nUSER: Hello\nASSISTANT: Hi, how can I help?\n</chat_history>"
    fields = {"model": "smollm2", "stream": False, "max_tokens": 64}  # set for tasks by the admin
    for task in (FOLLOW_UPS, TITLE, TAGS):
        messages = [user(f"### Task:\n{task}\n### Chat History:{history}")]
        answer = await post(TEXT, "chat/completions", messages=messages, **fields)
        assert answer["choices"][0]["message"]["content"]


@step("tool loop, streamed")
async def _():
    messages = [user(f"SCRIPT: {CALL} ||| It was Monday.")]
    fields = {"stream": True, "model": "scripted", **USAGE, "tools": BUILT_IN}
    events = await post(TOOLS, "chat/completions", messages=messages, **fields)
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    same(json.loads(arguments), {"days_ago": 3})
    function = {"name": calls[0]["function"]["name"], "arguments": arguments}
    call = {"id": calls[0]["id"], "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"current_timestamp": 7}'}
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    same(text_of(await post(TOOLS, "chat/completions", messages=messages, **fields)),
         "It was Monday.")  # fmt: skip


@step("continued answer")
async def _():
    messages = [user("Count to five."), {"role": "assistant", "content": "One, two,"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    fields = {"stream": True, "model": "smollm2", "messages": messages, **USAGE, **flags}
    assert text_of(await post(TEXT, "chat/completions", max_tokens=8, **fields))


@step("tool loop by responses, streamed")
async def _():
    tools = [{"type": "function", **tool["function"], "strict": False} for tool in BUILT_IN]
    text = {"type": "input_text", "text": f"SCRIPT: {CALL} ||| It was Monday."}
    messages = [{"type": "message", "role": "user", "content": [text]}]
    fields = {"stream": True, "model": "scripted", "tools": tools, "instructions": "Be brief."}
    *_, last = await post(TOOLS, "responses", input=messages, **fields)
    (call,) = last["response"]["output"]
    same(json.loads(call["arguments"]), {"days_ago": 3})
    call = {name: call[name] for name in ("type", "call_id", "name", "arguments")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    *_, last = await post(TOOLS, "responses", input=[*messages, call, result], **fields)
    same(last["response"]["output"][0]["content"][0]["text"], "It was Monday.")
