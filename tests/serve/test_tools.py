"""The official OpenAI client calls functions of a server, in each family's format."""

import contextlib
import json
from itertools import product

import jsonschema
import pytest

from cases import slow
from served import MODEL, client, serving
from specedge.request import GenerationRequest
from specedge.runtime.sampling.history import History
from specedge.serve.tools.call_format import call_format_of
from specedge.serve.tools.declarations import FunctionTool, ToolSet
from specedge.serve.tools.families import family_of
from tool_pairs import tool_pair
from tool_templates import CLOCK, TEMPLATES, WEATHER, spelled

MESSAGES = [{"role": "user", "content": "Is it <|im_start|>hot?"}]
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
FLAT = [{"type": "function", **one} for one in (WEATHER, CLOCK)]
STRICT = [{"type": "function", "function": one | {"strict": True}} for one in (WEATHER, CLOCK)]
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "temperature": 1, "tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALLS = [("weather", {"city": "Rom", "days": 3}), ("clock", {})]
# One family of each form of calls, whose marks are tokens or may be text.
FORMS = ("Qwen", "Llama 3", "Mistral, ids")
PAIRS = [*((name, True) for name in FORMS), slow("Qwen", False)]


@pytest.fixture(scope="module")
def pairs():
    """Of a family, with marks that are tokens or text: the pair and a client of its server."""
    with contextlib.ExitStack() as stack:
        made = {}

        def pair(name, special=True):
            if (name, special) not in made:
                pipeline = tool_pair(name, special=special)
                port = stack.enter_context(serving(pipeline, model=MODEL))
                made[name, special] = pipeline, stack.enter_context(client(port))
            pipeline, ai = made[name, special]
            pipeline.text = None
            return pipeline, ai

        yield pair


def calls_of(message):
    found = [one.function for one in message.tool_calls or []]
    return [(one.name, json.loads(one.arguments)) for one in found]


def joined(chunks):
    """The content, calls and finish reason of a streamed answer."""
    content, calls, reason = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                if part.id:
                    assert (part.index, part.type) == (len(calls), "function")
                    calls.append([part.function.name, ""])
                calls[part.index][1] += part.function.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls], reason


@pytest.mark.parametrize(("name", "special"), PAIRS)
def test_named_function_call_follows_its_schema(pairs, name, special):
    _, ai = pairs(name, special)
    asked = ASKED | {"tool_choice": NAMED, "seed": 0}
    whole = ai.chat.completions.create(**asked).choices[0]
    ((called, arguments),) = calls_of(whole.message)
    assert (called, whole.finish_reason) == ("weather", "tool_calls")
    assert whole.message.content is None
    assert whole.message.tool_calls[0].id.startswith("call_")
    jsonschema.validate(arguments, WEATHER["parameters"])
    chunks = list(ai.chat.completions.create(stream=True, **asked))
    assert joined(chunks) == ("", [("weather", arguments)], "tool_calls")
    parts = [p for c in chunks for p in c.choices[0].delta.tool_calls or []]
    assert len(parts) > 2


@pytest.mark.parametrize(("name", "special"), PAIRS)
def test_required_call_does_not_depend_on_speculation(pairs, name, special):
    _, ai = pairs(name, special)
    asked = ASKED | {"tool_choice": "required", "temperature": 0, "max_tokens": 120}
    found = []
    for how in ({"off": True}, {"num_draft_tokens": 4}, {"drafter": "lookup"}):
        choice = ai.chat.completions.create(extra_body={"speculative": how}, **asked).choices[0]
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
        found.append((calls, choice.finish_reason))
    assert found == [found[0]] * 3
    assert found[0][1] in ("tool_calls", "length")  # greedy calls may go on and on
    assert {called for called, _ in found[0][0]} <= {"weather", "clock"}


@pytest.mark.parametrize("name", FORMS)
def test_parallel_tool_calls_false_yields_one_call(pairs, name):
    _, ai = pairs(name)
    asked = ASKED | {"tool_choice": "required", "parallel_tool_calls": False}
    choice = ai.chat.completions.create(seed=0, **asked).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize("name", FORMS)
def test_unforced_calls_are_parsed_with_and_without_streaming(pairs, name):
    pipeline, ai = pairs(name)
    calls = CALLS[:1] if name == "Llama 3" else CALLS
    before = "" if name == "Llama 3" else "Let me see."
    pipeline.text = spelled(name, calls, before)
    asked = ASKED | {"max_tokens": 150}
    choice = ai.chat.completions.create(**asked).choices[0]
    assert choice.message.content == (before or None)
    assert (calls_of(choice.message), choice.finish_reason) == (calls, "tool_calls")
    chunks = ai.chat.completions.create(stream=True, **asked)
    assert joined(chunks) == (before, calls, "tool_calls")
    items = ai.responses.create(model=MODEL, input="Hot?", tools=FLAT).output
    assert [item.type for item in items] == ["message"] * bool(before) + ["function_call"] * len(
        calls
    )


@pytest.mark.parametrize("name", ["Qwen", "Llama 3"])
def test_text_without_calls_is_plain_content(pairs, name):
    pipeline, ai = pairs(name)
    for text in ("It is hot. ", spelled(name, [("rain", {})])):
        pipeline.text = text
        choice = ai.chat.completions.create(**ASKED).choices[0]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert choice.message.tool_calls is None
        chunks = ai.chat.completions.create(stream=True, **ASKED)
        assert joined(chunks) == (text, [], "stop")


@pytest.mark.parametrize("name", FORMS)
def test_strict_function_call_follows_its_schema(pairs, name):
    """A bias makes the model begin a call."""
    pipeline, ai = pairs(name)
    marker = "{" if name == "Llama 3" else family_of(TEMPLATES[name]).marker
    bias = {str(pipeline.tokenizer.token_to_id(marker)): 100}
    asked = ASKED | {"tools": STRICT, "logit_bias": bias, "parallel_tool_calls": False}
    for seed in range(2):
        choice = ai.chat.completions.create(seed=seed, **asked).choices[0]
        ((called, arguments),) = calls_of(choice.message)
        assert choice.finish_reason == "tool_calls"
        if called == "weather":
            jsonschema.validate(arguments, WEATHER["parameters"])


@pytest.mark.parametrize(("name", "special"), [*product(TEMPLATES, [True]), ("Qwen", False)])
def test_strict_grammar_allows_any_text_except_invalid_calls(pairs, name, special):
    pipeline, _ = pairs(name, special)
    tools = ToolSet((FunctionTool(**WEATHER, strict=True), FunctionTool("clock", "", {}, False)))
    calling = call_format_of(pipeline.bundle, pipeline.tokenizer, tools)

    def follows(text):
        one = pipeline.grammars.constraint(GenerationRequest(grammar=calling.grammar))
        ids = pipeline.tokenizer.encode(text, add_special_tokens=False).ids
        text = [*ids, pipeline.bundle.end_tokens[0]]
        return not any(one.banned(History([], text[:i]))[text[i]] for i in range(len(text)))

    before = "" if name == "Llama 3" else "I <tool [TOOL_CALL look. "
    few = [("clock", {"any": ["thing"]})]
    good = [few, CALLS[:1]] if name == "Llama 3" else [few, CALLS, CALLS[:1] * 2]
    texts = ["", "It is hot.", "<think>", "<think>{ a</think><think>b"]
    texts += [] if name == "Llama 3" else [spelled(name, few, "a<think>b")]
    for text in (*texts, *(spelled(name, calls, before) for calls in good)):
        assert follows(text)
    bad = [[("rain", {})], [("weather", {})], [("weather", {"city": "Rom", "days": 99})]]
    for calls in bad:
        assert not follows(spelled(name, calls, before))
    assert not follows(spelled(name, few, before)[:-1])


@pytest.mark.parametrize(("name", "special"), PAIRS)
def test_calls_and_tool_results_are_rendered_by_template(pairs, name, special):
    pipeline, ai = pairs(name, special)
    asked = ASKED | {"tool_choice": NAMED, "seed": 1}
    message = ai.chat.completions.create(**asked).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "31 degrees"}
    ai.chat.completions.create(**ASKED | {"messages": [*MESSAGES, message, result]})
    prompt = pipeline.asked_text
    start = spelled(name, [("weather", {})]).rpartition("{}")[0]
    kept = json.dumps(json.loads(message.tool_calls[0].function.arguments))
    if name == "Mistral, ids":
        start = start[start.index("[ARGS]") :]
    assert f"{start}{kept}" in prompt
    assert "31 degrees" in prompt.partition(kept)[2]
    assert '"description"' in prompt


def test_responses_api_supports_calls_streaming_and_results(pairs):
    pipeline, ai = pairs("Qwen")
    given = {"model": MODEL, "tools": FLAT, "temperature": 0, "max_output_tokens": 60}
    named = {"type": "function", "name": "weather"}
    whole = ai.responses.create(input="Hot?", tool_choice=named, **given)
    (call,) = whole.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert call.call_id.startswith("call_")
    jsonschema.validate(json.loads(call.arguments), WEATHER["parameters"])
    assert (whole.status, whole.parallel_tool_calls) == ("completed", True)
    assert (whole.tools[0].name, whole.tool_choice.name) == ("weather", "weather")

    with ai.responses.stream(input="Hot?", tool_choice=named, **given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments == events[-3].arguments
    assert len(deltas) > 2
    assert final.output[0].arguments == call.arguments

    pipeline.text = "Yes."
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "31 degrees"}
    asked = {"role": "user", "content": "Hot?"}
    answer = ai.responses.create(input=[asked, call.model_dump(), output], **given)
    assert answer.output_text == "Yes."
    prompt = pipeline.asked_text
    assert f'{{"name": "weather", "arguments": {call.arguments}}}\n</tool_call>' in prompt
    assert "31 degrees" in prompt


def test_streamed_response_sends_text_before_calls(pairs):
    pipeline, ai = pairs("Hermes")
    pipeline.text = spelled("Hermes", CALLS, "Let me see.")
    given = {"model": MODEL, "input": "Hot?", "tools": FLAT}
    with ai.responses.stream(**given) as stream:
        events = list(stream)
    added = [e.item.type for e in events if e.type == "response.output_item.added"]
    assert added == ["message", "function_call", "function_call"]
    final = events[-1].response
    assert (final.output_text, [item.type for item in final.output]) == ("Let me see.", added)
    done = [e.item.id for e in events if e.type == "response.output_item.done"]
    assert done == [item.id for item in final.output]


def test_truncated_call_reports_length_at_every_endpoint(pairs):
    _, ai = pairs("Qwen")
    few = 20
    asked = ASKED | {"tool_choice": NAMED, "max_tokens": few, "temperature": 0}
    choice = ai.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert call.function.arguments.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)
    chunks = list(ai.chat.completions.create(stream=True, **asked))
    assert chunks[-1].choices[0].finish_reason == "length"
    found = ai.responses.create(
        model=MODEL,
        input="Is it <|im_start|>hot?",
        tools=FLAT,
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=few,
        temperature=0,
    )
    assert (found.status, found.output[0].status) == ("incomplete", "incomplete")
    assert found.output[0].arguments == call.function.arguments


def test_call_tokens_have_logprobs_and_outcomes(pairs):
    _, ai = pairs("Qwen")
    asked = ASKED | {"tool_choice": NAMED, "seed": 1, "logprobs": True}
    whole = ai.chat.completions.create(**asked)
    chunks = list(ai.chat.completions.create(stream=True, extra_body={"trace": True}, **asked))
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole.choices[0].logprobs.content
    assert len(streamed) == whole.usage.completion_tokens - 1  # all but the end token
    spans = [span["text"] for chunk in chunks for span in getattr(chunk.choices[0], "spans", ())]
    assert "".join(spans).startswith('<tool_call>\n{"name": "weather"')


def test_tool_choice_none_omits_tools_from_prompt(pairs):
    pipeline, ai = pairs("Qwen")
    pipeline.text = spelled("Qwen", CALLS)
    message = ai.chat.completions.create(**ASKED | {"tool_choice": "none"}).choices[0].message
    assert message.tool_calls is None
    assert "clock" not in pipeline.tokenizer.decode(pipeline.asked)


def test_special_tokens_in_tool_descriptions_are_encoded_as_text(pairs):
    pipeline, _ = pairs("Qwen")

    def count(description):
        tool = {"type": "function", "function": CLOCK | {"description": description}}
        tokens = pipeline.prompts.chat_tokens(MESSAGES, tools=[tool])
        assert description in pipeline.tokenizer.decode(tokens, skip_special_tokens=False)
        return tokens.count(pipeline.tokenizer.token_to_id("<|im_end|>"))

    assert count("Tells <|im_end|> it.") == count("Tells it.") > 0
