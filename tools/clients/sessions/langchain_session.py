# client: LangChain
# pip: langchain-openai==1.7.4
import json

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from steps import ANSWER, LOOP, REPORT, REPORT_CALL, TEXT, TOOLS, same, step

KEY = {"api_key": "none", "max_retries": 0}
text = ChatOpenAI(model="smollm2", base_url=f"{TEXT}/v1", temperature=0, max_tokens=8, **KEY)
tools = ChatOpenAI(model="scripted", base_url=f"{TOOLS}/v1", **KEY)


class Report(BaseModel):
    """Report of the weather."""

    city: str
    degrees: int | None = None


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"31 in {city}"


def loop(model, content=LOOP):
    messages = [HumanMessage(content)]
    for _ in range(3):
        messages.append(answer := model.invoke(messages))
        if not answer.tool_calls:
            return answer
        messages += [weather.invoke(call) for call in answer.tool_calls]
    raise AssertionError("the calls do not end")


@step("invoke, stream and batch")
def _():
    whole = text.invoke("What is the sky?")
    same("".join(chunk.text for chunk in text.stream("What is the sky?")), whole.text)
    same(whole.usage_metadata["output_tokens"], 8)
    same(len(text.batch(["One", "Two", "Three"])), 3)


@step("reasoning effort")
def _():
    model = ChatOpenAI(model="smollm2", base_url=f"{TEXT}/v1", reasoning_effort="low",
                       max_tokens=8, **KEY)  # fmt: skip
    assert model.invoke("Hello").text


@step("completion model")
def _():
    model = OpenAI(model="smollm2", base_url=f"{TEXT}/v1", max_tokens=8, temperature=0, **KEY)
    same("".join(model.stream("The sky is")), model.invoke("The sky is"))


@step("structured output: json_schema, function_calling, json_mode")
def _():
    same(tools.with_structured_output(Report).invoke(f"SCRIPT: {REPORT}").degrees, 31)
    model = tools.with_structured_output(Report, method="function_calling")
    same(model.invoke(f"SCRIPT: {REPORT_CALL}").degrees, 31)
    model = tools.with_structured_output(Report, method="json_mode")
    same(model.invoke(f"JSON. SCRIPT: {REPORT}").degrees, 31)


@step("tool loop: auto, any, named")
def _():
    same(loop(tools.bind_tools([weather])).text, ANSWER)
    for choice in ("any", "weather"):
        (call,) = tools.bind_tools([weather], tool_choice=choice).invoke(LOOP).tool_calls
        same(call["args"], {"city": "Rome"})


@step("streamed tool call")
def _():
    whole = None
    for chunk in tools.bind_tools([weather]).stream(LOOP):
        whole = chunk if whole is None else whole + chunk
    same(whole.tool_calls[0]["args"], {"city": "Rome"})


@step("truncated call in the history")
def _():
    model = tools.bind_tools([weather])
    messages = [HumanMessage(LOOP), model.bind(max_tokens=18, tool_choice="required").invoke(LOOP)]
    (call,) = messages[-1].invalid_tool_calls or messages[-1].tool_calls
    messages.append(ToolMessage("cut", tool_call_id=call["id"]))
    same(model.invoke(messages).text, ANSWER)


@step("Responses API: two turns, tools")
def _():
    url = {"use_responses_api": True, **KEY}
    model = ChatOpenAI(model="smollm2", base_url=f"{TEXT}/v1", max_tokens=8, **url)
    messages = [HumanMessage("Hello"), model.invoke("Hello"), HumanMessage("And?")]
    assert model.invoke(messages).text
    model = ChatOpenAI(model="scripted", base_url=f"{TOOLS}/v1", **url).bind_tools([weather])
    same(loop(model).text, ANSWER)
    assert json.loads(tools.invoke(f"SCRIPT: {REPORT}").text)
