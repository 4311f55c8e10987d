"""Formats of calls of today's model families, against templates of the published shape."""

import json

import jsonschema
import pytest

from cases import slow
from served import MODEL, client, serving
from specedge.serve.reasoning import ReasoningDelta
from specedge.serve.tools.declarations import FunctionTool, ToolSet
from specedge.serve.tools.families import family_of
from specedge.serve.tools.harmony import HarmonyParser
from specedge.serve.tools.parser import ToolCallParser
from templates import CHATML
from tool_pairs import scripted_pair

WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Rom", "Bonn"]},
            "days": {"enum": [1, 2]},
            "wind": {"type": "boolean"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK = {"name": "clock", "description": "Tells the time."}
FUNCTIONS = ToolSet(
    (
        FunctionTool("weather", "", WEATHER["parameters"], False),
        FunctionTool("clock", "", {}, False),
        FunctionTool("write", "", {"properties": {"text": {"type": "string"}}}, False),
    )
)
# A template shows the tools, and of an assistant's message the calls as its family writes them.
SHAPE = (
    "{%- if tools %}{{- '[S]' + (tools | tojson) }}{%- endif %}"
    "{%- for message in messages %}{{- '[' + message.role + ']' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}"
    "SHOWN{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}{{- '[assistant]' }}{%- endif %}"
)
ITEMS = "{%- for k, v in call.arguments | items %}PAIR{%- endfor %}"


def shape(shown, pair="", before=""):
    return before + SHAPE.replace("SHOWN", shown.replace("ITEMS", ITEMS.replace("PAIR", pair)))


CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = CALL
FAMILIES = {
    "Qwen3-Coder": (
        shape(
            "<tool_call>\n<function={{ call.name }}>\nITEMS</function>\n</tool_call>",
            "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n",
        ),
        "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n<parameter=days>\n2"
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "GLM 4": (
        shape(
            "<tool_call>{{ call.name }}\nITEMS</tool_call>",
            "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}"
            "</arg_value>\n",
        ),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rom</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "LFM2": (
        shape("<|tool_call_start|>[{{ call.name }}(ITEMS)]<|tool_call_end|>", "{{ k }}={{ v }},"),
        '<|tool_call_start|>[weather(city="Rom", days=2)]<|tool_call_end|>',
    ),
    "pythonic": (
        shape(
            "[{{ call.name }}(ITEMS)]",
            "{{ k }}={{ v }},",
            before="{# [func_name1(params_name1=params_value1)] #}",
        ),
        '[weather(city="Rom", days=2)]',
    ),
    "Gemma 4": (
        shape(
            "<|tool_call>call:{{ call.name }}{ {%- raw %}{{% endraw %}ITEMS}<tool_call|>",
            "{{ k }}:{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }},",
        ),
        '<|tool_call>call:weather{city:<|"|>Rom<|"|>,days:2}<tool_call|>',
    ),
    "DeepSeek V3.1": (
        shape(
            f"{CALLS[0]}{BEGIN}{{{{ call.name }}}}{SEPARATOR}"
            f"{{{{ call.arguments }}}}{END}{CALLS[1]}"
        ),
        f'{CALLS[0]}{BEGIN}weather{SEPARATOR}{{"city": "Rom", "days": 2}}{END}{CALLS[1]}',
    ),
    "DeepSeek V3": (
        shape(
            f"{CALLS[0]}{BEGIN}function{SEPARATOR}{{{{ call.name }}}}\n```json\n"
            "{{ call.arguments | tojson }}\n```" + END + CALLS[1]
        ),
        f"{CALLS[0]}{BEGIN}function{SEPARATOR}weather\n```json\n"
        f'{{"city": "Rom", "days": 2}}\n```{END}{CALLS[1]}',
    ),
    "Command R": (
        shape(
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ call.name }}", "parameters": '
            "{{ call.arguments | tojson }}}]<|END_ACTION|>"
        ),
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Rom", "days": 2}}\n]<|END_ACTION|>',
    ),
    "Granite 3": (
        shape(
            '<|tool_call|>[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]'
        ),
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom", "days": 2}}]',
    ),
    "Phi-4-mini": (
        shape(
            '<|tool_call|>[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]'
            "<|/tool_call|>"
        ),
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom", "days": 2}}]<|/tool_call|>',
    ),
    "JSON": (
        shape('{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}'),
        '{"name": "weather", "arguments": {"city": "Rom", "days": 2}}',
    ),
}  # fmt: skip
EXPECTED = [("weather", {"city": "Rom", "days": 2})]


def read(name, pieces):
    parser = ToolCallParser(FUNCTIONS, family_of(FAMILIES[name][0]), has_grammar=False)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [(p.name, json.loads(p.arguments)) for p in parts if not isinstance(p, str)]
    return text, calls


def cuts(text):
    return [[text], [*text], *([text[:i], text[i:]] for i in range(1, len(text)))]


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_detected_from_template_and_calls_are_parsed(name):
    template, text = FAMILIES[name]
    assert family_of(template).name == name
    for pieces in cuts(text):
        assert read(name, pieces) == ("", EXPECTED)
    if name not in ("pythonic", "JSON"):
        assert read(name, [*f"Let me see <too.\n{text}"]) == ("Let me see <too.", EXPECTED)
        assert read(name, [*"Nothing <| to call. </"]) == ("Nothing <| to call. </", [])
    broken = text.replace("weather", "unknown")
    assert read(name, [*broken]) == (broken, [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("Qwen3-Coder", "<function=clock>\n</function>", [("clock", {})]),
        (
            "Qwen3-Coder",
            "<tool_call>\n<function=write>\n<parameter=text>\n5 </tool_call> <b>\n\n</parameter>\n"
            "</function>\n</tool_call>",
            [("write", {"text": "5 </tool_call> <b>\n"})],
        ),
        ("GLM 4", "<tool_call>clock</tool_call>", [("clock", {})]),
        ("LFM2", "<|tool_call_start|>[clock(), weather(city='Rom', wind=true)]<|tool_call_end|>",
         [("clock", {}), ("weather", {"city": "Rom", "wind": True})]),
        ("pythonic", "[clock(), write(text=None)]", [("clock", {}), ("write", {"text": None})]),
        ("pythonic", "[write(text='a\\')]b', days=[{'a': ')'}])]",
         [("write", {"text": "a')]b", "days": [{"a": ")"}]})]),
        ("Gemma 4", '<|tool_call>call:write{text:{a:[1,<|"|>b}<|"|>],c:null}}<tool_call|>',
         [("write", {"text": {"a": [1, "b}"], "c": None}})]),
        ("Granite 3", '<|tool_call|>[{"name": "clock"}, {"name": "write", "arguments": "{}"}]',
         [("clock", {}), ("write", {})]),
        ("JSON", '```json\n[{"name": "clock"}, {"name": "write", "args": {"text": "a"}}]\n```',
         [("clock", {}), ("write", {"text": "a"})]),
        ("JSON", '{"function": {"name": "clock", "arguments": "{}"}}', [("clock", {})]),
    ],
)  # fmt: skip
def test_calls_are_parsed_leniently(name, text, calls):
    assert read(name, [*text]) == ("", calls)


def two_calls(name):
    """Return the text of two calls of a family, for Rom and for Bonn."""
    template, text = FAMILIES[name]
    family = family_of(template)
    inner = text.removeprefix(family.opening).removesuffix(family.closing)
    both = family.between.join((inner, inner.replace("Rom", "Bonn")))
    return family.opening + both + family.closing


@pytest.mark.parametrize("name", FAMILIES)
def test_truncated_second_call_keeps_the_first(name):
    text = two_calls(name)
    assert read(name, [*text]) == ("", [*EXPECTED, ("weather", {"city": "Bonn", "days": 2})])
    for end in range(text.index("Bonn") - 3, len(text)):
        assert read(name, [text[:end]])[1][:1] == EXPECTED


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_in_several_blocks_are_parsed(name):
    text = FAMILIES[name][1]
    count = 1 if name == "pythonic" else 2  # unmarked calls begin a text
    for pieces in ([text + text], [text, text], [*text, *text]):
        assert read(name, pieces)[1][:count] == EXPECTED * count


@pytest.mark.parametrize("name", FAMILIES)
def test_text_after_calls_is_content(name):
    text, calls = read(name, [*FAMILIES[name][1], "\nDone."])
    assert (text.strip(), calls) == ("Done.", EXPECTED)


@pytest.fixture(scope="module", params=[*FAMILIES, "explained"])
def served_family(request):
    template = CHATML if request.param == "explained" else FAMILIES[request.param][0]
    family = family_of(template)
    assert family.name == request.param
    marks = [mark for mark in family.delimiters if mark != "```json"]
    pipeline = scripted_pair(template, dict.fromkeys(marks, True))
    with serving(pipeline, model=MODEL) as port, client(port) as ai:
        yield request.param, pipeline, ai


TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Hot?"}], "tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    "served_family",
    [*(family if i % 3 == 0 else slow(family) for i, family in enumerate(FAMILIES)), "explained"],
    indirect=True,
)
def test_forced_call_uses_family_format_and_round_trips_in_history(served_family):
    _, pipeline, ai = served_family
    pipeline.text = None
    asked = ASKED | {"tool_choice": NAMED, "seed": 3, "max_tokens": 200}
    choice = ai.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    chunks = [c.choices[0] for c in ai.chat.completions.create(stream=True, **asked)]
    deltas = [d for chunk in chunks for d in chunk.delta.tool_calls or []]
    assert "".join(d.function.arguments for d in deltas) == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"}
    pipeline.text = "Yes."
    messages = [*ASKED["messages"], choice.message, result]
    answer = ai.chat.completions.create(**ASKED | {"messages": messages}).choices[0]
    assert answer.message.content == "Yes."
    prompt = pipeline.asked_text
    assert prompt.count("weather") >= 2
    assert "31 degrees" in prompt
    assert json.loads(call.function.arguments)["city"] in prompt


@pytest.mark.parametrize(
    "served_family",
    [
        family if i % 4 == 0 else pytest.param(family, marks=pytest.mark.slow(exhaustive=True))
        for i, family in enumerate(FAMILIES)
    ],
    indirect=True,
)
def test_response_format_with_tools_allows_call_or_formatted_text(served_family):
    _, pipeline, ai = served_family
    pipeline.text = None
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = ASKED | {"response_format": form, "temperature": 1, "max_tokens": 200}
    message = ai.chat.completions.create(seed=0, **asked).choices[0].message
    if message.tool_calls:
        assert {call.function.name for call in message.tool_calls} <= {"weather", "clock"}
    else:
        assert json.loads(message.content) == {"a": 1}, message


HARMONY = (
    "{%- if tools %}{{ tools | tojson }}{%- endif %}{%- for message in messages %}"
    "{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}{#<|channel|>#}"
)
HARMONY_TEXT = (
    "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"city": "Rom", "days": 2}<|call|>'
)


def test_harmony_channels_are_split_for_any_chunk_boundaries():
    text = HARMONY_TEXT + "<|start|>assistant<|channel|>final<|message|>It is <hot.<|return|>"
    for pieces in cuts(text):
        parser = HarmonyParser(("weather",))
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
        thinking = "".join(p.text for p in parts if isinstance(p, ReasoningDelta))
        assert thinking == "Need the weather."
        assert "".join(part for part in parts if isinstance(part, str)) == "It is <hot."
        calls = [p for p in parts if not isinstance(p, str | ReasoningDelta)]
        assert "".join(p.arguments for p in calls) == '{"city": "Rom", "days": 2}'
        assert (calls[0].name, calls[0].index) == ("weather", 0)


# Texts as openai-harmony 0.0.8 renders them, with what its parser reads: analysis, text, calls.
RENDERED = {
    "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>final"
    "<|message|>Hi<|return|>": ("", "Let me see.Hi", []),
    ' to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>': (
        "", "", [("weather", '{"a": 1}')]),
    "<|channel|>commentary to=functions.weather json<|message|>{}<|call|><|start|>assistant"
    "<|channel|>analysis<|message|>a < b <| c<|end|>": ("a < b <| c", "", [("weather", "{}")]),
    "<|channel|>analysis to=python code<|message|>print(1)<|call|>": ("print(1)", "", []),
    '<|channel|>final <|constrain|>json<|message|>{"a":1}<|return|>': ("", '{"a":1}', []),
    "<|channel|>commentary to=functions.other<|message|>{}<|call|>": ("", "{}", []),
    "<|channel|>analysis<|message|>é\n\n😀<|end|><|start|>assistant": ("é\n\n😀", "", []),
    "<|message|>plain": ("", "plain", []),
    # Which its parser refuses.
    "plain text": ("", "plain text", []),
    "<|channel|>analysis": ("", "", []),
}  # fmt: skip


@pytest.mark.parametrize("text", RENDERED)
def test_harmony_parser_agrees_with_openai_harmony(text):
    for pieces in cuts(text):
        parser = HarmonyParser(("weather",))
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
        reasoning = "".join(p.text for p in parts if isinstance(p, ReasoningDelta))
        answer = "".join(part for part in parts if isinstance(part, str))
        deltas = [p for p in parts if not isinstance(p, str | ReasoningDelta)]
        names = [delta.name for delta in deltas if delta.name]
        arguments = "".join(delta.arguments for delta in deltas)
        calls = [(name, arguments) for name in names]
        assert (reasoning, answer, calls) == RENDERED[text]


def test_harmony_model_serves_reasoning_calls_and_formats():
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
    pipeline = scripted_pair(HARMONY, dict.fromkeys(marks, True))
    with serving(pipeline, model=MODEL) as port, client(port) as ai:
        pipeline.text = HARMONY_TEXT
        message = ai.chat.completions.create(**ASKED).choices[0].message
        assert message.reasoning_content == "Need the weather."
        assert json.loads(message.tool_calls[0].function.arguments) == EXPECTED[0][1]
        pipeline.text = None
        asked = ASKED | {"tool_choice": NAMED, "max_tokens": 120, "seed": 1}
        end = pipeline.tokenizer.token_to_id("<|end|>")
        body = {"logit_bias": {str(end): 20}}
        (call,) = ai.chat.completions.create(extra_body=body, **asked).choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])
        plain = {"model": MODEL, "messages": ASKED["messages"], "max_tokens": 60}
        message = ai.chat.completions.create(extra_body=body | {"regex": "(yes|no)"}, **plain)
        assert message.choices[0].message.content in ("yes", "no")
