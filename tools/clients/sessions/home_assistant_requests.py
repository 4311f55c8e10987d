# client: Home Assistant 2026.11.0 (its requests)
# pip: openai==3.26.0
"""Requests of Home Assistant, by the OpenAI package that it pins.

Fields, their order, and what is read of the answers are those of `entity.py` of its integration
`openai_conversation` (home-assistant/core, 2026.11.0), with the tools of its Assist API. Its
address can be set only by OPENAI_BASE_URL, so many install "Extended OpenAI Conversation" instead
(jekalmin/extended_openai_conversation at commit 1daab07), whose chats are here, too.
"""

import json

from openai import AsyncOpenAI

from steps import TOOLS, same, step

CONVERSATION, AGENT = "01KB0ZC4T9V7K1Q3W5X7Y9ZA2B", "01KB0Z8M3N5P7R9S1T3V5X7Z9B"
TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
SLOTS = {"name": TEXT, "area": TEXT, "floor": TEXT}
SYSTEM = """You are a voice assistant for Home Assistant.
Answer questions about the world truthfully.
Answer in plain text. Keep it simple and to the point.
When controlling a device, prefer passing just name and domain.
You are in area Kitchen and all generic commands like 'turn on the lights' target this area.
Static Context: An overview of the areas and the devices in this smart home:
- names: Lamp
  domain: light
  areas: Kitchen

Current time is 18:42:00. Today's date is 2026-11-26.
"""


def tool(function, description, **properties):
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": "function", "name": function, "parameters": parameters,
            "description": description, "strict": False}  # fmt: skip


def texts(*enum):
    return {"type": "array", "items": TEXT | ({"enum": list(enum)} if enum else {})}


ASSIST = [
    tool("homeassistant__GetLiveContext", "Provides the CURRENT state of devices and areas.",
         name=TEXT, domain={"anyOf": [TEXT, texts()]}, area=TEXT),
    tool("intent__HassTurnOn", "Turns on/opens/presses a device or entity.", **SLOTS,
         domain=texts(), device_class=texts("outlet", "switch", "curtain", "shutter")),
    tool("intent__HassTurnOff", "Turns off/closes a device or entity.", **SLOTS,
         domain=texts(), device_class=texts("outlet", "switch", "curtain", "shutter")),
    tool("intent__HassCancelAllTimers", "Cancels all timers", area=TEXT),
    tool("light__HassLightSet", "Sets the brightness percentage or color of a light", **SLOTS,
         domain=texts("light"), color=TEXT, temperature=NUMBER,
         brightness=NUMBER | {"maximum": 100, "description": "The brightness percentage"}),
    tool("llm__GetDateTime", "Provides the current date and time."),
]  # fmt: skip
ARGUMENTS = {"name": "Lamp", "domain": ["light"], "brightness": 40}
CALL = json.dumps({"name": "light__HassLightSet", "arguments": ARGUMENTS})
SCRIPT = f"SCRIPT: <tool_call> {CALL} </tool_call> ||| The lamp is on."
RESULT = {"data": {"speech": {}, "response_type": "action_done", "data": {"success": []}},
          "error": False}  # fmt: skip


def home():
    return AsyncOpenAI(api_key="none", base_url=f"{TOOLS}/v1")


def agent(model):
    """Return the fields that each request of an agent with this model has."""
    fields = {
        "model": model,
        "max_output_tokens": 3000,
        "safety_identifier": CONVERSATION,
        "prompt_cache_key": AGENT,
        "service_tier": "auto",
        "store": False,
        "stream": True,
    }
    if model.startswith("gpt-5"):
        fields |= {"reasoning": {"effort": "low", "summary": "auto"},
                   "text": {"verbosity": "medium"}}  # fmt: skip
    else:
        fields |= {"top_p": 1.0, "temperature": 1.0}
    return fields | {"prompt_cache_retention": "24h"}


def history(text):
    return [{"type": "message", "role": "developer", "content": SYSTEM},
            {"type": "message", "role": "user", "content": text}]  # fmt: skip


async def read(stream):
    """Return the items of a stream as Home Assistant sends them back, and the text."""
    items, text, call = [], "", None
    async for event in stream:
        if event.type == "response.output_item.added" and event.item.type == "function_call":
            call = event.item
        elif event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.function_call_arguments.delta":
            call.arguments += event.delta
        elif event.type == "response.function_call_arguments.done":
            arguments = json.dumps(json.loads(call.arguments), separators=(",", ":"))
            items.append({"type": "function_call", "name": call.name, "arguments": arguments,
                          "call_id": call.call_id})  # fmt: skip
        elif event.type == "response.completed":
            assert event.response.usage.output_tokens
        else:
            assert event.type not in ("response.failed", "response.incomplete", "error"), event
    return items, text


async def converse(model, thinking=()):
    """Run an agent's loop: a call, its result, and the answer."""
    messages, fields = history(SCRIPT), agent(model) | {"tools": ASSIST}
    async with home() as client:
        (call,), text = await read(await client.responses.create(input=messages, **fields))
        same((text, json.loads(call["arguments"])), ("", ARGUMENTS))
        output = json.dumps(RESULT, separators=(",", ":"))
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        messages += [*thinking, call, result]
        stream = await client.responses.create(input=messages, **fields)
        same(await read(stream), ([], "The lamp is on."))


@step("set-up: models")
async def _():
    async with home() as client:
        assert [model.id async for model in client.models.list(timeout=10.0)]


@step("Assist: call of an intent, its result, answer")
async def _():
    await converse("scripted")


@step("Assist with a reasoning model and web search")
async def _():
    summary = [{"type": "summary_text", "text": "The lamp."}]
    thinking = {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "VGhl"}
    ASSIST.append({"type": "web_search", "search_context_size": "medium"})
    await converse("gpt-5-mini", [thinking])


@step("AI task: structured data")
async def _():
    properties = {"names": texts(), "brightest": {"type": ["string", "null"]}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False,
              "required": ["names", "brightest"], "strict": True}  # fmt: skip
    answer = {"names": ["Lamp"], "brightest": None}
    text = {"format": {"type": "json_schema", "name": "lights", "schema": schema, "strict": True}}
    messages = history(f"SCRIPT: {json.dumps(answer)}")
    async with home() as client:
        stream = await client.responses.create(input=messages, text=text, **agent("scripted"))
        same(json.loads((await read(stream))[1]), answer)


@step("Extended OpenAI Conversation: services by chat")
async def _():
    service = {"domain": "light", "service": "turn_on", "service_data": {"entity_id": "light.a"}}
    data = {"type": "object", "properties": {"entity_id": TEXT}, "required": ["entity_id"]}
    item = {"type": "object", "properties": {"domain": TEXT, "service": TEXT, "service_data": data},
            "required": ["domain", "service", "service_data"]}  # fmt: skip
    parameters = {"type": "object", "properties": {"list": {"type": "array", "items": item}}}
    function = {"name": "execute_services", "description": "Execute services of devices.",
                "parameters": parameters}  # fmt: skip
    call = json.dumps({"name": "execute_services", "arguments": {"list": [service]}})
    script = f"SCRIPT: <tool_call> {call} </tool_call> ||| The lamp is on."
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": script}]
    fields = {"model": "scripted", "stream": True, "stream_options": {"include_usage": True},
              "max_tokens": 500, "top_p": 1, "temperature": 0.5,
              "tools": [{"type": "function", "function": function}]}  # fmt: skip
    async with home() as client:
        stream = await client.chat.completions.create(
            messages=messages, tool_choice="auto", **fields
        )
        chunks = [chunk async for chunk in stream]
        same(chunks[-1].choices, [])
        assert chunks[-1].usage.total_tokens
        choices = [chunk.choices[0] for chunk in chunks[:-1]]
        same(choices[-1].finish_reason, "tool_calls")
        deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
        arguments = json.loads("".join(delta.function.arguments or "" for delta in deltas))
        same(arguments, {"list": [service]})
        function = {"name": deltas[0].function.name, "arguments": json.dumps(arguments)}
        call = {"id": deltas[0].id, "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call["id"], "content": '{"result":"True"}'}
        messages += [{"role": "assistant", "tool_calls": [call]}, result]
        stream = await client.chat.completions.create(
            messages=messages, tool_choice="none", **fields
        )
        text = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
        same("".join(text), "The lamp is on.")
