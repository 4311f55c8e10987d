# client: OpenAI Agents SDK
# pip: openai-agents==0.24.0
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from steps import ANSWER, CALL, LOOP, REPORT, TEXT, TOOLS, same, step

set_tracing_disabled(True)


class Report(BaseModel):
    city: str
    degrees: int


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"31 in {city}"


def models(url, name):
    for api in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield api(name, openai_client=client)


GREEDY = ModelSettings(temperature=0)


@step("run, two turns")
async def _():
    for model in models(TEXT, "smollm2"):
        agent = Agent("a", instructions="Be brief.", model=model, model_settings=GREEDY)
        first = await Runner.run(agent, "Say hello.")
        assert first.final_output
        next_input = [*first.to_input_list(), {"role": "user", "content": "And?"}]
        assert (await Runner.run(agent, next_input)).final_output


@step("streaming")
async def _():
    for model in models(TEXT, "smollm2"):
        result = Runner.run_streamed(Agent("a", model=model, model_settings=GREEDY), "Say hello.")
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        same("".join(deltas), result.final_output)


@step("tools")
async def _():
    for model in models(TOOLS, "scripted"):
        agent = Agent("a", model=model, tools=[weather])
        same((await Runner.run(agent, LOOP)).final_output, ANSWER)
        streamed = Runner.run_streamed(agent, LOOP)
        assert [event async for event in streamed.stream_events()]
        same(streamed.final_output, ANSWER)


@step("output type beside tools")
async def _():
    script = f"SCRIPT: {CALL} ||| {REPORT}"
    for model in models(TOOLS, "scripted"):
        agent = Agent("a", model=model, tools=[weather], output_type=Report)
        same((await Runner.run(agent, script)).final_output, Report(city="Rome", degrees=31))


@step("handoff")
async def _():
    call = CALL.replace("weather", "transfer_to_other").replace('{"city": "Rome"}', "{}")
    for model in models(TOOLS, "scripted"):
        other = Agent("other", model=model)
        agent = Agent("a", model=model, handoffs=[other])
        result = await Runner.run(agent, f"SCRIPT: {call} ||| I am the other one.")
        same((result.last_agent.name, result.final_output), ("other", "I am the other one."))
