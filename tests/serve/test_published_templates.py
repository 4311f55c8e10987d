"""Requests of chats have the prompts of transformers, for templates of the published shape."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import transformers

from corpus import train_tokenizer
from published_templates import TEMPLATES
from specedge.bundle import Bundle, store
from specedge.chat_templates import chat_template_of
from specedge.runtime.text.prompts import Prompts
from specedge.serve.errors import ApiError
from specedge.serve.requests import ParserSettings, parse_chat, prepare

BUNDLE = Bundle.read(store.embedded_folder())
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
USER = {"role": "user", "content": 'Is 1 < 2 & "so" on, é?'}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Yes.", "reasoning_content": "1 is less\nthan 2."}
ARGUMENTS = {"city": "Rüm", "days": 2, "at": {"h": [1, None]}, "wind": True}
FUNCTION = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "I look.",
    "tool_calls": [{"id": "a23456789", "type": "function", "function": FUNCTION}],
}
RESULT = {
    "role": "tool", "content": "31 °C", "tool_call_id": "a23456789", "name": "weather",
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "properties": {
                "city": {"type": "string", "description": "A city", "enum": ["Rüm", "Bonn"]},
                "days": {"type": "integer", "default": 1},
                "at": {"type": "object", "properties": {"h": {"type": "array"}}},
                "wind": {"type": ["boolean", "null"]},
            },
            "required": ["city"],
            "type": "object",
        },
    },
}
CHATS = {
    "question": ([USER], None),
    "system": ([SYSTEM, USER, ANSWER, USER], None),
    "reasoning": ([USER, ANSWER, USER], None),
    "tools": ([USER], [TOOL]),
    "call": ([SYSTEM, USER, CALL, RESULT], [TOOL]),
    "commented": ([USER, CALL | {"content": "Let me look."}, RESULT], [TOOL]),
    "answered": ([USER, CALL, RESULT, ANSWER, USER], [TOOL]),
    "twice": ([SYSTEM, USER, CALL, RESULT, CALL, RESULT, ANSWER, USER], [TOOL]),
}
# Templates that take no tools get them explained in a message, which transformers does not do.
# The others show calls as text, or tools in a message.
WITHOUT_TOOLS = {"Gemma 2", "Gemma 3", "Phi 3", "SmolLM 2", "SmolLM 3", "OLMo 2", "SmolVLM"}
WITHOUT_TOOLS |= {"DeepSeek V3", "DeepSeek R1", "Phi-4-mini"}
# Gemma 2 takes no system message, and Mistral's leaves one out unless the user wrote last.
REFUSED = {("Gemma 2", "system"), ("Mistral 7B", "call")}
# What a user of transformers writes for a template.
THINKING = {"gpt-oss"}
PARTS = {"SmolVLM": ("system", "user", "assistant"), "Mistral Small, parts": ("system",)}
JSON_ARGUMENTS = {"DeepSeek V3", "DeepSeek R1", "DeepSeek V3.1"}
CASES = [
    (name, chat)
    for name in TEMPLATES
    for chat in CHATS
    if not (CHATS[chat][1] and name in WITHOUT_TOOLS) and (name, chat) not in REFUSED
]


@pytest.fixture(scope="module")
def references():
    """Return transformers' tokenizer of a template, with its marks as special tokens."""
    backend = train_tokenizer(["What is the question? <|user|> assistant"] * 3, 300)
    made = {}

    def reference(name):
        if name not in made:
            wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
            marks = re.findall(r"<[|｜][^<>\s'\"]*[|｜]>|\[/?[A-Z_]+\]", str(TEMPLATES[name]))
            wrapped.add_special_tokens({"additional_special_tokens": sorted({*marks})})
            wrapped.chat_template = TEMPLATES[name]
            made[name] = wrapped
        return made[name]

    return reference


def written_for(name, message):
    """Return a message as a user of transformers writes it for a template."""
    message = json.loads(json.dumps(message))
    if name == "gpt-oss" and message["content"] == "Let me look.":
        message |= {"content": "", "reasoning_content": "I look.\n\nLet me look."}
    if name in THINKING and "reasoning_content" in message:
        message["thinking"] = message.pop("reasoning_content")
    if message["role"] in PARTS.get(name, ()):
        message["content"] = [{"type": "text", "text": message["content"]}]
    for call in message.get("tool_calls", []):
        arguments = json.loads(call["function"]["arguments"])
        if name in JSON_ARGUMENTS:
            arguments = json.dumps(arguments, ensure_ascii=False)
        call["function"]["arguments"] = arguments
    return message


def prompt_of(reference, messages, tools, **fields):
    """Return the tokens of the prompt of a chat's request, and their text."""
    special = {k: v for k, v in reference.special_tokens_map.items() if type(v) is str}
    bundle = dataclasses.replace(
        BUNDLE, chat_template=chat_template_of(reference.chat_template), special_tokens=special
    )
    tokenizer = reference.backend_tokenizer
    pipeline = SimpleNamespace(
        bundle=bundle,
        tokenizer=tokenizer,
        prompts=SimpleNamespace(  # of any length
            chat_tokens=Prompts(bundle, tokenizer).chat_tokens,
            tokens=lambda tokens: tokens,
            decoder_tokens=lambda prefix: [],
        ),
        sampling=lambda request: None,
    )
    body = {"messages": messages, "tools": tools} | fields
    prepared = prepare(pipeline, parse_chat(body, ParserSettings(4096)))
    (tokens,) = prepared.prompts
    return tokens, tokenizer.decode(tokens, skip_special_tokens=False)


def test_templates_cover_todays_families():
    assert len(TEMPLATES) >= 25


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_request_prompt_equals_transformers_prompt(references, name, chat):
    reference = references(name)
    messages, tools = CHATS[chat]
    thinking = [{"enable_thinking": on, "thinking": on} for on in (True, False)]
    for variables in ({}, *(thinking if "thinking" in str(TEMPLATES[name]) else ())):
        text = reference.apply_chat_template(
            [written_for(name, message) for message in messages],
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
        tokens, decoded = prompt_of(reference, messages, tools, chat_template_kwargs=variables)
        assert decoded == text
        assert tokens == reference(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("name", "chat"), sorted(REFUSED))
def test_chat_with_dropped_system_message_is_rejected(references, name, chat):
    with pytest.raises(ApiError, match=r"System role not supported|drops messages\[0\]"):
        prompt_of(references(name), *CHATS[chat])


CALL_TEXT = '{"name": "weather", "arguments": ' + json.dumps(ARGUMENTS, ensure_ascii=False) + "}"


def test_calls_unsupported_by_template_are_rendered_in_family_format(references):
    chat, tools = CHATS["call"]
    _, text = prompt_of(references("SmolLM 3"), chat, tools)
    assert f"<|im_start|>assistant\n<tool_call>\n{CALL_TEXT}\n</tool_call><|im_end|>" in text
    assert text.count("Tells the weather.") == 1
    reference = references("Phi-4-mini")
    reference.add_special_tokens({"additional_special_tokens": ["<|tool_call|>", "<|/tool_call|>"]})
    functions = json.dumps([TOOL["function"]], ensure_ascii=False)
    _, text = prompt_of(reference, chat, tools)
    assert text == (
        f"<|system|>Be brief.<|tool|>{functions}<|/tool|><|end|><|user|>{USER['content']}<|end|>"
        f"<|assistant|><|tool_call|>[{CALL_TEXT}]<|/tool_call|><|end|><|tool|>31 °C<|end|>"
        "<|assistant|>"
    )


@pytest.mark.parametrize("name", ["Llama 3.1", "gpt-oss"])
def test_parallel_calls_are_split_for_single_call_templates(references, name):
    call = CALL["tool_calls"][0]
    other = json.loads(json.dumps(call).replace("weather", "clock")) | {"id": "b23456789"}
    both = {"role": "assistant", "content": None, "tool_calls": [call, other]}
    results = [RESULT, {"role": "tool", "tool_call_id": "b23456789", "content": "noon"}]
    one, two = ({**CALL, "tool_calls": [each], "reasoning_content": ""} for each in (call, other))
    separate = [USER, one, results[0], two, results[1] | {"name": "clock"}]
    reference = references(name)
    expected = reference.apply_chat_template(
        [written_for(name, message) for message in separate],
        tools=[TOOL],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert prompt_of(reference, [USER, both, *reversed(results)], [TOOL])[1] == expected
