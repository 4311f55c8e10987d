# client: Home Assistant
# written: requests
import json

from steps import TOOLS, post, same, step

ENTITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "area": {"type": "string"},
        "domain": {"type": "array", "items": {"type": "string", "enum": ["light", "switch"]}},
        "brightness": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": [],
}
TURN_ON = {"name": "HassTurnOn", "description": "Turns on a device.", "parameters": ENTITY}
NOW = {"name": "GetDateTime", "description": "Provides the current date and time.",
       "parameters": {"type": "object", "properties": {}, "required": []}}  # fmt: skip
SYSTEM = "You are a voice assistant for Home Assistant.\nStatic Context: - names: Lamp\n"
ARGUMENTS = {"name": "Lamp", "domain": ["light"], "brightness": 40}
CALL = json.dumps({"name": "HassTurnOn", "arguments": ARGUMENTS})
SCRIPT = f"SCRIPT: <tool_call> {CALL} </tool_call> ||| The lamp is on."
RESULT = json.dumps({"speech": {}, "response_type": "action_done", "data": {"success": []}})


@step("chat: tools, streamed")
def _():
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": SCRIPT}]
    tools = [{"type": "function", "function": function} for function in (TURN_ON, NOW)]
    body = {"model": "scripted", "messages": messages, "tools": tools, "stream": True,
            "max_completion_tokens": 3000, "top_p": 1.0, "temperature": 1.0, "user": "01J",
            "stream_options": {"include_usage": True}}  # fmt: skip
    url = f"{TOOLS}/v1/chat/completions"
    deltas = [choice["delta"] for event in post(url, body) for choice in event["choices"]]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls") or []]
    same(json.loads(call["function"]["arguments"]), ARGUMENTS)
    messages += [{"role": "assistant", "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]  # fmt: skip
    deltas = [choice["delta"] for event in post(url, body) for choice in event["choices"]]
    same("".join(delta.get("content") or "" for delta in deltas), "The lamp is on.")


@step("responses: tools and reasoning, streamed")
def _():
    items = [{"type": "message", "role": "developer", "content": SYSTEM},
             {"type": "message", "role": "user", "content": SCRIPT}]  # fmt: skip
    tools = [{"type": "function", "strict": False, **function} for function in (TURN_ON, NOW)]
    body = {"model": "scripted", "input": items, "tools": tools, "stream": True, "store": False,
            "max_output_tokens": 3000, "user": "01J", "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "medium"},
            "service_tier": "auto", "prompt_cache_key": "01J"}  # fmt: skip
    *_, last = post(f"{TOOLS}/v1/responses", body)
    output = last["response"]["output"]
    (call,) = [item for item in output if item["type"] == "function_call"]
    same(json.loads(call["arguments"]), ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    *_, last = post(f"{TOOLS}/v1/responses", body | {"input": [*items, *output, result]})
    same(last["response"]["output"][-1]["content"][0]["text"], "The lamp is on.")
