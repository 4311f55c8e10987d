# client: LlamaIndex
# pip: llama-index-llms-openai-like==0.8.1
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from steps import ANSWER, LOOP, REPORT, REPORT_CALL, TEXT, TOOLS, same, step


def model(url, name, **options):
    options = {"is_chat_model": True, "context_window": 4096, "max_retries": 0} | options
    return OpenAILike(model=name, api_base=f"{url}/v1", api_key="none", **options)


text = model(TEXT, "smollm2", max_tokens=8, temperature=0)
tools = model(TOOLS, "scripted", is_function_calling_model=True)


class Report(BaseModel):
    """Report of the weather."""

    city: str
    degrees: int


def tell_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"31 in {city}"


weather = FunctionTool.from_defaults(tell_weather, name="weather")


@step("chat, streaming, two turns")
def _():
    messages = [ChatMessage(role="user", content="Hello")]
    whole = text.chat(messages)
    same("".join(piece.delta or "" for piece in text.stream_chat(messages)), whole.message.content)
    assert text.chat([*messages, whole.message, *messages]).message.content


@step("complete, by chat and by completion")
def _():
    for chat in (True, False):
        llm = model(TEXT, "smollm2", max_tokens=8, temperature=0, is_chat_model=chat)
        pieces = [piece.delta or "" for piece in llm.stream_complete("The sky is")]
        same("".join(pieces), llm.complete("The sky is").text)


@step("tools: auto, required")
def _():
    for required in (False, True):
        response = tools.chat_with_tools([weather], user_msg=LOOP, tool_required=required)
        (call,) = tools.get_tool_calls_from_response(response)
        same(call.tool_kwargs, {"city": "Rome"})


@step("agent")
async def _():
    agent = FunctionAgent(tools=[weather], llm=tools, streaming=True)
    same(str(await agent.run(LOOP)), ANSWER)


@step("structured output, by call and by format")
def _():
    response = tools.as_structured_llm(Report).complete(f"SCRIPT: {REPORT_CALL}")
    same(response.raw.degrees, 31)
    llm = model(TOOLS, "scripted", should_use_structured_outputs=True)
    same(llm.as_structured_llm(Report).complete(f"SCRIPT: {REPORT}").raw.degrees, 31)
