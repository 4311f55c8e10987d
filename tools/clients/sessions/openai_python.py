# client: OpenAI Python
# pip: openai==3.57.0
import enum
import json

import openai
from pydantic import BaseModel

from steps import ANSWER, CALL, LOOP, SCHEMA, TEXT, TOOLS, same, step

text = openai.OpenAI(base_url=f"{TEXT}/v1", api_key="none", max_retries=0)
tools = openai.OpenAI(base_url=f"{TOOLS}/v1", api_key="none", max_retries=0)
REQUEST = {"model": "smollm2", "messages": [{"role": "user", "content": "What is the sky?"}]}
WEATHER = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}
FUNCTIONS = [{"type": "function", "function": WEATHER | {"strict": True}}]


class Scale(enum.Enum):
    CELSIUS = "celsius"
    KELVIN = "kelvin"


class Weather(BaseModel):
    city: str
    degrees: int
    scale: Scale | None


REPORT = 'SCRIPT: {"city": "Rome", "degrees": 31, "scale": "celsius"}'


def user(content):
    return [{"role": "user", "content": content}]


@step("chat")
def _():
    response = text.chat.completions.create(max_tokens=8, temperature=0, **REQUEST)
    assert response.choices[0].message.content
    same(response.usage.completion_tokens, 8)


@step("streaming")
def _():
    options = {"stream_options": {"include_usage": True}, "reasoning_effort": "low"}
    chunks = list(
        text.chat.completions.create(max_tokens=8, temperature=0, stream=True, **options, **REQUEST)
    )
    whole = text.chat.completions.create(max_tokens=8, temperature=0, **REQUEST)
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    same(joined, whole.choices[0].message.content)
    same(chunks[-1].usage.completion_tokens, 8)


@step("log-probabilities and n")
def _():
    options = {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 4, "seed": 1}
    response = text.chat.completions.create(**options, **REQUEST)
    same([len(choice.logprobs.content) for choice in response.choices], [4, 4])


@step("completions")
def _():
    response = text.completions.create(model="smollm2", prompt=["The sky", "A cat"], max_tokens=4)
    same([choice.index for choice in response.choices], [0, 1])
    (scored,) = text.completions.create(
        model="smollm2", prompt="The sky is", max_tokens=0, echo=True, logprobs=1
    ).choices
    same(scored.text, "The sky is")
    same([value is None for value in scored.logprobs.token_logprobs], [True, False, False])


@step("parsed output")
def _():
    response = tools.chat.completions.parse(
        model="scripted", messages=user(REPORT), response_format=Weather
    )
    same(response.choices[0].message.parsed, Weather(city="Rome", degrees=31, scale="celsius"))
    small = text.chat.completions.create(
        max_tokens=60, response_format={"type": "json_schema", "json_schema": {
            "name": "color", "schema": {"enum": ["red", "blue"]}}}, **REQUEST
    )  # fmt: skip
    assert json.loads(small.choices[0].message.content) in ("red", "blue")


@step("tools, auto and forced")
def _():
    forced = {"type": "function", "function": {"name": "weather"}}
    for choice in ("auto", "required", forced):
        response = tools.chat.completions.create(
            model="scripted", messages=user(LOOP), tools=FUNCTIONS, tool_choice=choice
        ).choices[0]
        (call,) = response.message.tool_calls
        same(json.loads(call.function.arguments), {"city": "Rome"})
        same(response.finish_reason, "tool_calls")


@step("tool loop, streamed")
def _():
    messages = user(LOOP)
    options = {"model": "scripted", "tools": FUNCTIONS}
    with tools.chat.completions.stream(messages=messages, **options) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "31"}]
    response = tools.chat.completions.create(messages=messages, **options)
    same(response.choices[0].message.content, ANSWER)


@step("parsed output beside tools")
def _():
    messages = user(f"SCRIPT: {CALL} ||| {REPORT.removeprefix('SCRIPT: ')}")
    options = {"model": "scripted", "tools": FUNCTIONS, "response_format": Weather}
    message = tools.chat.completions.parse(messages=messages, **options).choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "31"}]
    response = tools.chat.completions.parse(messages=messages, **options)
    same(response.choices[0].message.parsed.degrees, 31)


@step("truncated call in the history")
def _():
    options = {"model": "scripted", "tools": FUNCTIONS, "tool_choice": "required"}
    messages = user(LOOP)
    message = tools.chat.completions.create(messages=messages, max_tokens=18, **options)
    message = message.choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "cut"}]
    response = tools.chat.completions.create(messages=messages, **options | {"tool_choice": "auto"})
    same(response.choices[0].message.content, ANSWER)


@step("responses")
def _():
    request = {"model": "smollm2", "max_output_tokens": 8, "temperature": 0}
    whole = text.responses.create(input="Hello", **request)
    assert whole.output_text
    with text.responses.stream(input="Hello", **request) as stream:
        events = list(stream)
    same(events[-1].response.output_text, whole.output_text)
    same([events[0].type, events[-1].type], ["response.created", "response.incomplete"])
    again = text.responses.create(input="And?", previous_response_id=whole.id, **request)
    same(again.previous_response_id, whole.id)


@step("responses with tools")
def _():
    options = {"model": "scripted", "tools": [{"type": "function", **WEATHER}]}
    options |= {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}}
    items = user(LOOP)
    with tools.responses.stream(input=items, **options) as stream:
        for _ in stream:
            pass
        output = stream.get_final_response().output
    call = next(item for item in output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "31"}
    response = tools.responses.create(input=[*items, *output, result], **options)
    same(response.output_text, ANSWER)


@step("parsed responses")
def _():
    response = tools.responses.parse(model="scripted", input=REPORT, text_format=Weather)
    same(response.output_parsed.city, "Rome")


@step("errors")
def _():
    try:
        text.chat.completions.create(temperature=-1, **REQUEST)
    except openai.BadRequestError as error:
        same(error.param, "temperature")
    else:
        raise AssertionError("a negative temperature was accepted")
    messages = user("word " * 9000)
    try:
        text.chat.completions.create(model="smollm2", messages=messages)
    except openai.BadRequestError as error:
        same(error.code, "context_length_exceeded")
    else:
        raise AssertionError("a prompt longer than the context was accepted")
