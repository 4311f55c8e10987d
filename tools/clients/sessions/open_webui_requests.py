# client: Open WebUI
# written: requests
import json
import urllib.request

from steps import CALL, TEXT, TOOLS, post, same, step

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Name of the city."}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS}}  # fmt: skip
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
FEATURES = {"image_generation": False, "code_interpreter": False, "web_search": False}
CHAT = {"chat_id": "c", "id": "m", "session_id": "s", "params": {}, "features": FEATURES,
        "variables": {"{{USER_NAME}}": "a"}, "background_tasks": {"title_generation": True},
        "tool_servers": [], "filter_ids": [], "model_item": {"id": "smollm2"}}  # fmt: skip


def text_of(events):
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


@step("models")
def _():
    with urllib.request.urlopen(f"{TEXT}/v1/models") as response:
        same(json.load(response)["data"][0]["id"], "smollm2")


@step("chat with history, streamed")
def _():
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "smollm2", "messages": messages, "max_tokens": 16, **STREAMED, **CHAT}
    events = post(f"{TEXT}/v1/chat/completions", body)
    assert text_of(events)
    same(events[-1]["usage"]["completion_tokens"], 16)
    messages += [{"role": "assistant", "content": text_of(events)},
                 {"role": "user", "content": [{"type": "text", "text": "And?"}]}]  # fmt: skip
    assert text_of(post(f"{TEXT}/v1/chat/completions", body))


@step("title, tags and follow-ups")
def _():
    prompt = "### Task: Generate a title in JSON.\n<chat_history>\nUSER: Hello\n</chat_history>"
    body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}]}
    body |= {"stream": False, "max_completion_tokens": 24, "metadata": {"task": "title"}}
    assert post(f"{TEXT}/v1/chat/completions", body)["choices"][0]["message"]["content"]


@step("native tool calls, streamed")
def _():
    script = f"SCRIPT: {CALL} ||| It is 31 degrees."
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": script}]
    body = {"model": "scripted", "messages": messages, "tools": [TOOL], **STREAMED}
    url = f"{TOOLS}/v1/chat/completions"
    deltas = [choice["delta"] for event in post(url, body) for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or []]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    same(json.loads(arguments), {"city": "Rome"})
    call = {"index": 0, "id": calls[0]["id"], "type": "function",
            "function": {"name": "weather", "arguments": arguments}}  # fmt: skip
    messages += [{"role": "assistant", "content": None, "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": call["id"], "content": "31"}]  # fmt: skip
    same(text_of(post(url, body)), "It is 31 degrees.")
