# client: LiteLLM
# pip: litellm==1.110.2
import asyncio
import json

import litellm
from pydantic import BaseModel

from steps import ANSWER, LOOP, SCHEMA, TEXT, TOOLS, same, step

text = {"model": "hosted_vllm/smollm2", "api_base": f"{TEXT}/v1", "api_key": "none"}
tools = {"model": "openai/scripted", "api_base": f"{TOOLS}/v1", "api_key": "none"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


class Report(BaseModel):
    city: str


def user(content):
    return [{"role": "user", "content": content}]


@step("chat and streaming")
def _():
    options = {"messages": user("Hello"), "max_tokens": 8, "temperature": 0} | text
    whole = litellm.completion(**options).choices[0].message.content
    chunks = litellm.completion(stream=True, **options)
    same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole)


@step("two turns")
def _():
    message = litellm.completion(messages=user("Hello"), max_tokens=8, **text).choices[0].message
    for earlier in (message, message.model_dump()):
        messages = [*user("Hello"), earlier, *user("And?")]
        assert litellm.completion(messages=messages, max_tokens=8, **text).choices


@step("tool loop")
def _():
    messages = user(LOOP)
    message = litellm.completion(messages=messages, tools=[WEATHER], **tools).choices[0].message
    (call,) = message.tool_calls
    same(json.loads(call.function.arguments), {"city": "Rome"})
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "31"}]
    response = litellm.completion(messages=messages, tools=[WEATHER], **tools)
    same(response.choices[0].message.content, ANSWER)


@step("structured output (Pydantic)")
def _():
    response = litellm.completion(
        messages=user('SCRIPT: {"city": "Rome"}'), response_format=Report, **tools
    )
    same(Report.model_validate_json(response.choices[0].message.content).city, "Rome")


@step("text completion")
def _():
    options = text | {"model": "text-completion-openai/smollm2"}
    assert litellm.text_completion(prompt="The sky is", max_tokens=4, **options).choices[0].text


@step("responses")
def _():
    response = litellm.responses(
        input="Hello", max_output_tokens=8, **text | {"model": "openai/smollm2"}
    )
    assert response.output[0].content[0].text


@step("Anthropic bridge (/v1/messages)")
def _():
    async def ask():
        return await litellm.anthropic.messages.acreate(
            messages=user("Hello"), max_tokens=8, **text | {"model": "openai/smollm2"}
        )

    assert asyncio.run(ask())["content"][0]["text"]
