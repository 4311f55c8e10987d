# client: Anthropic Python
# pip: anthropic==2.14.0
import anthropic

from steps import ANSWER, LOOP, SCHEMA, TEXT, TOOLS, same, step

text = anthropic.Anthropic(base_url=TEXT, api_key="none", max_retries=0)
tools = anthropic.Anthropic(base_url=TOOLS, api_key="none", max_retries=0)
REQUEST = {"model": "smollm2", "max_tokens": 8, "extra_body": {"temperature": 0},
         "messages": [{"role": "user", "content": "What is the sky?"}]}  # fmt: skip
WEATHER = {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA,
           "cache_control": {"type": "ephemeral"}}  # fmt: skip
SYSTEM = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]


@step("messages and streaming")
def _():
    whole = text.messages.create(system=SYSTEM, **REQUEST)
    same((whole.stop_reason, whole.usage.output_tokens), ("max_tokens", 8))
    with text.messages.stream(system=SYSTEM, **REQUEST) as stream:
        joined = "".join(stream.text_stream)
    same(joined, whole.content[0].text)


@step("counted tokens")
def _():
    count = text.messages.count_tokens(model="smollm2", messages=REQUEST["messages"]).input_tokens
    usage = text.messages.create(**REQUEST).usage
    same(count, usage.input_tokens + (usage.cache_read_input_tokens or 0))


@step("tool loop, streamed")
def _():
    options = {"model": "scripted", "max_tokens": 100, "tools": [WEATHER]}
    messages = [{"role": "user", "content": LOOP}]
    with tools.messages.stream(messages=messages, **options) as stream:
        message = stream.get_final_message()
    same(message.stop_reason, "tool_use")
    call = next(block for block in message.content if block.type == "tool_use")
    same(call.input, {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "31"}
    messages += [{"role": "assistant", "content": message.content},
                 {"role": "user", "content": [result]}]  # fmt: skip
    response = tools.messages.create(messages=messages, **options)
    same(response.content[0].text, ANSWER)


@step("forced tool")
def _():
    response = tools.messages.create(
        model="scripted", max_tokens=100, tools=[WEATHER],
        messages=[{"role": "user", "content": LOOP}],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    )  # fmt: skip
    same(response.content[0].input, {"city": "Rome"})


@step("tool runner")
def _():
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return f"31 in {city}"

    runner = tools.beta.messages.tool_runner(
        model="scripted", max_tokens=100, tools=[weather],
        messages=[{"role": "user", "content": LOOP}],
    )  # fmt: skip
    same(runner.until_done().content[0].text, ANSWER)


@step("errors")
def _():
    try:
        text.messages.create(
            **REQUEST | {"messages": [{"role": "user", "content": "word " * 9000}]}
        )
    except anthropic.BadRequestError as error:
        same(error.body["error"]["type"], "invalid_request_error")
    else:
        raise AssertionError("a prompt longer than the context was accepted")
