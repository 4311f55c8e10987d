"""Calls in the text of an answer, however the text is cut into pieces."""

import json
import random

import pytest

from specedge.serve.tools import parser as parser_module
from specedge.serve.tools.declarations import FunctionTool, ToolSet
from specedge.serve.tools.families import family_of
from specedge.serve.tools.json_scanner import JsonScanner
from specedge.serve.tools.parser import ToolCallParser
from tool_templates import TEMPLATES, spelled

TOOLS = ToolSet(tuple(FunctionTool(name, "", {}, False) for name in ("weather", "clock", "we")))
CALLS = [("weather", {"city": 'R"}]\\o</tool_call>[ARGS]m', "é": [{}, "{"]}), ("clock", {})]


def read(name, pieces, has_grammar=False, tools=TOOLS):
    """The text, and the name and arguments of each call."""
    parser = ToolCallParser(tools, family_of(TEMPLATES[name]), has_grammar)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    text, calls = "", []
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        if part.name is not None:
            assert (part.index, part.id[:5]) == (len(calls), "call_")
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    return text, [(called, json.loads(arguments)) for called, arguments in calls]


def cuts(text):
    """A text whole, by character, and in two at every place."""
    return [[text], [*text], *([text[:i], text[i:]] for i in range(1, len(text)))]


def calls_of(name):
    return CALLS[:1] if name == "Llama 3" else [*CALLS, *CALLS]


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_parsed_for_any_chunk_boundaries(name, forced):
    for pieces in cuts(spelled(name, calls_of(name))):
        assert read(name, pieces, forced) == ("", calls_of(name))


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "Llama 3"])
def test_text_before_calls_is_stripped_of_trailing_whitespace(name, forced):
    for pieces in cuts(spelled(name, CALLS, " I look <tool> [TOO it up. ")):
        assert read(name, pieces, forced) == (" I look <tool> [TOO it up.", CALLS)


ODD = {
    "Qwen": [
        "a <tool_call> is a tag",
        " \n<tool_call>{}</tool_call> b",
        '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>',
        '<tool_call>{"name": "clock", "arguments": []}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": [-1e999]}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {',
        '<tool_call>{"name": ["clock"], "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 10**5,
        "<tool_cal",
        " \n",
    ],
    "Llama 3": [
        '{"a": 1} and more',
        ' x {"name": "clock", "parameters": {}}',
        "<|python_tag|>weather.call(city='Rom')",
        " <|python_ta",
        "\n ",
    ],
    "Mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        '[TOOL_CALLS] [{"name": "rain", "arguments": {}}]',
        "a [TOOL_CALL] b",
    ],
    "Mistral, newer": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]rain[ARGS]{}",
        "[TOOL_CALLS]clock[ARGS]",
        "[TOOL_CALLS]clock[ARGS]{} and more",
        "[TOOL_CALLS]clock{}",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(n, text) for n in ODD for text in ODD[n]])
def test_text_without_calls_is_unchanged(name, text):
    pieces = cuts(text) if len(text) < 200 else [[text]]
    for one in pieces:
        assert read(name, one) == (text, [])


def test_call_after_malformed_call_is_parsed():
    text = f"<tool_call> or {spelled('Qwen', CALLS)}\n\n and\n"
    for pieces in cuts(text):
        assert read("Qwen", pieces) == ("<tool_call> or\n\n and\n", CALLS)


def test_alternative_call_syntaxes_are_parsed():
    reversed_ = '<tool_call>{"arguments": {"a": 1}, "name": "we"}'
    assert read("Hermes", [*reversed_]) == ("", [("we", {"a": 1})])
    tagged = '<|python_tag|>{"name": "we", "parameters": {"a": 1}}\n'
    assert read("Llama 3", [*tagged]) == ("", [("we", {"a": 1})])
    close = '[TOOL_CALLS][{"name":"we","arguments":{"a":1},"id":"abcDEF123"}]'
    assert read("Mistral", [*close]) == ("", [("we", {"a": 1})])


def test_parallel_false_limits_to_one_call():
    single = ToolSet(TOOLS.functions, parallel=False)
    for name in ("Qwen", "Mistral", "Mistral, newer"):
        assert read(name, spelled(name, CALLS), tools=single) == ("", CALLS[:1])


def test_truncated_forced_call_streams_partial_arguments():
    text = spelled("Qwen", [("weather", {"city": "Rom"})])
    parser = ToolCallParser(TOOLS, family_of(TEMPLATES["Qwen"]), has_grammar=True)
    parts = parser.feed(text[: text.index("om")])
    assert [part.arguments for part in parts] == ["", '{"city": "R']
    assert (parser.end(), parser.is_complete) == ([], False)
    assert (
        ToolCallParser(TOOLS, family_of(TEMPLATES["Qwen"]), has_grammar=True).feed(text[:20]) == []
    )


def test_call_format_is_detected_from_chat_template():
    found = [family_of(template) for template in TEMPLATES.values()]
    assert [one.name for one in found] == ["Hermes"] * 2 + ["Llama 3"] + ["Mistral"] * 3
    assert [one.short_ids for one in found] == [False] * 3 + [True] + [False] * 2


CLEAR = {
    "Qwen": [
        "<tool_call> i",
        "<tool_call>[",
        '<tool_call>{"name": 01',
        '<tool_call>{"name": "rain", "arguments": {}}',
        '<tool_call>{"name": "clock", "arguments": {}, }',
        '<tool_call>{"name": "clock", "arguments": {"a": "</tool_call>"}}\n<a',
    ],
    "Llama 3": [
        '{"a": "b"}',
        "{a",
        "<|python_tag|>w",
    ],
    "Mistral": [
        "[TOOL_CALLS]c",
        "[TOOL_CALLS] []",
        '[TOOL_CALLS] [{"name": "rain", "arguments": {}}]',
    ],
    "Mistral, newer": [
        "[TOOL_CALLS]]",
        "[TOOL_CALLS]clocks",
        "[TOOL_CALLS]clo]",
        "[TOOL_CALLS]clock[ARGS]a",
        "[TOOL_CALLS]clock[CALL_ID]a_1[A]",
        "[TOOL_CALLS]clock[CALL_ID]a1[ARGS]{}\n[TOOL_CALLS]clock[ARGS]{} a",
    ],
}


@pytest.mark.parametrize(("name", "text"), [(n, text) for n in CLEAR for text in CLEAR[n]])
def test_text_is_streamed_once_it_cannot_be_a_call(name, text):
    for before in ("", "\n") if name == "Llama 3" else ("", "Hm. "):
        parser = ToolCallParser(TOOLS, family_of(TEMPLATES[name]), has_grammar=False)
        told = [part for one in before + text[:-1] for part in parser.feed(one)]
        assert "".join(told) == before.strip()
        told += parser.feed(text[-1])
        assert "".join(told) == before + text
        assert parser.feed(" more") == [" more"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_long_call_is_parsed_at_most_twice(name, monkeypatch):
    """Regression test: every piece after the first end marker reparsed the whole call."""
    num_parsed, read_whole = 0, parser_module._parse_calls

    def counted(*given):
        nonlocal num_parsed
        num_parsed += 1
        return read_whole(*given)

    monkeypatch.setattr(parser_module, "_parse_calls", counted)
    calls = [("weather", {"city": "</tool_call>" + "a" * 2000})]
    assert read(name, spelled(name, calls)) == ("", calls)
    assert num_parsed <= 2


def test_incremental_json_validator_agrees_with_json_module():
    """Compare with json: valid prefixes are accepted and invalid ones rejected."""
    rng = random.Random(0)
    values = [
        '{"a": [1, -0.5e+10, 20E3, {"b": {}}], "\\u00e9\\n\\"": [[], "x", true, false, null]}',
        '[0, 10, -1.25, 1e5, {"a" : "\\\\"} ,\t"\\/" ]',
        "[ ]",
        "{ }",
    ]
    letters = '{}[]":,\\u01e+-.tn \n\x01a'
    for _ in range(4000):
        text = list(rng.choice(values))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(2)] = rng.choice(letters)
        made, found, taken = JsonScanner(), "".join(text), 0
        if not found.startswith(("{", "[")):
            continue
        while taken < len(found) and not made.closed and made.take(found[taken]):
            taken += 1
        try:
            whole = json.JSONDecoder(parse_constant=_refused).raw_decode(found)[1]
        except ValueError:
            whole = None
        assert (taken if made.closed else None) == whole, repr(found)


def _refused(constant):
    raise ValueError(constant)


LENIENT = [
    ("Qwen", '<tool_call>{"name": "clock"}</tool_call>', ("", [("clock", {})])),
    ("Qwen", '<tool_call>{"name": "clock", "arguments": ""}</tool_call>', ("", [("clock", {})])),
    ("Qwen", '<tool_call>{"name": "clock", "arguments": null}</tool_call>', ("", [("clock", {})])),
    ("Qwen", '<tool_call>{"name": "we", "arguments": "{\\"a\\": 1}"}</tool_call>',
     ("", [("we", {"a": 1})])),
    ("Qwen", '<tool_call>{"name": "we", "parameters": {"a": 1}}</tool_call>',
     ("", [("we", {"a": 1})])),
    ("Llama 3", '{"name": "we", "arguments": {"a": 1}}', ("", [("we", {"a": 1})])),
    ("Llama 3", '{"name": "clock", "parameters": {}} and', ("and", [("clock", {})])),
    *(("Llama 3",
       '{"name": "clock", "parameters": {}}' + between + '{"name": "we", "parameters": {"a": 1}}',
       ("", [("clock", {}), ("we", {"a": 1})])) for between in ("", ";", "; ", "\n")),
    ("Llama 3", '{"name": "clock", "parameters": {}}; {"name": "we", "par',
     ('{"name": "we", "par', [("clock", {})])),
    ("Mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}}, {"name": "we", "argu',
     ('{"name": "we", "argu', [("clock", {})])),
    ("Mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}}] and', ("and", [("clock", {})])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), LENIENT)
def test_lenient_parsing_keeps_complete_calls_before_a_truncated_one(name, text, expected):
    for pieces in cuts(text):
        found = read(name, pieces)
        assert (found[0].strip(" ;"), found[1]) == expected
