# client: pydantic-ai
# pip: pydantic-ai-slim[openai]==2.68.0
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from steps import ANSWER, CALL, LOOP, REPORT, REPORT_CALL, TEXT, TOOLS, same, step

MODELS = (OpenAIChatModel, OpenAIResponsesModel)
SHORT = {"max_tokens": 8, "temperature": 0}


class Report(BaseModel):
    city: str
    degrees: int


def provider(url):
    return OpenAIProvider(base_url=f"{url}/v1", api_key="none")


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"31 in {city}"


@step("run, two turns, streaming")
async def _():
    for model in MODELS:
        agent = Agent(model("smollm2", provider=provider(TEXT)), model_settings=SHORT)
        first = await agent.run("Hello")
        assert (await agent.run("And?", message_history=first.all_messages())).output
        async with agent.run_stream("Hello") as stream:
            same(await stream.get_output(), first.output)


@step("tools")
async def _():
    for model in MODELS:
        agent = Agent(model("scripted", provider=provider(TOOLS)), tools=[weather])
        same((await agent.run(LOOP)).output, ANSWER)


@step("tool output")
async def _():
    call = REPORT_CALL.replace("Report", "final_result")
    for model in MODELS:
        agent = Agent(model("scripted", provider=provider(TOOLS)), output_type=Report)
        same((await agent.run(f"SCRIPT: {call}")).output.degrees, 31)


@step("native output beside tools, prompted output")
async def _():
    for model in MODELS:
        served = model("scripted", provider=provider(TOOLS))
        agent = Agent(served, tools=[weather], output_type=NativeOutput(Report))
        same((await agent.run(f"SCRIPT: {CALL} ||| {REPORT}")).output.degrees, 31)
        agent = Agent(served, output_type=PromptedOutput(Report))
        same((await agent.run(f"SCRIPT: {REPORT}")).output.degrees, 31)
