"""Requests of chats have the prompts of transformers, for templates of the published shape."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette", reason="needs the serve extra")
transformers = pytest.importorskip("transformers", reason="needs the export extra")

from corpus import train_tokenizer  # noqa: E402
from published_templates import TEMPLATES  # noqa: E402
from specedge.bundle import Bundle, store  # noqa: E402
from specedge.chat_templates import chat_template_of  # noqa: E402
from specedge.runtime.text.prompts import Prompts  # noqa: E402
from specedge.serve.errors import ApiError  # noqa: E402
from specedge.serve.requests import ParserSettings, parse_chat, prepare  # noqa: E402

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
    "answered": ([USER, CALL, RESULT, ANSWER, USER], [TOOL]),
    "twice": ([SYSTEM, USER, CALL, RESULT, CALL, RESULT, ANSWER, USER], [TOOL]),
}
# Templates that take no tools get them explained in a message, which transformers does not do.
WITHOUT_TOOLS = {"Gemma 2", "Gemma 3", "Phi 3", "SmolLM 2", "SmolLM 3", "OLMo 2", "SmolVLM"}
WITHOUT_TOOLS |= {"DeepSeek V3", "DeepSeek R1", "Phi-4-mini"}
# Gemma 2 takes no system message, and Mistral's leaves one out unless the user wrote last.
REFUSED = {("Gemma 2", "system"), ("Mistral 7B", "call")}
# What a user of transformers writes for a template.
THINKING = {"gpt-oss"}
PARTS = {"SmolVLM": ("system", "user", "assistant"), "Mistral Small, parts": ("system",)}
JSON_ARGUMENTS = {"DeepSeek V3", "DeepSeek R1", "DeepSeek V3.1"}
CASES = [
    (name, chat, thinking)
    for name in TEMPLATES
    for chat in CHATS
    for thinking in (None, True, False)
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
            chat_tokens=Prompts(bundle, tokenizer).chat_tokens, tokens=lambda tokens: tokens
        ),
        sampling=lambda request: None,
    )
    body = {"messages": messages, "tools": tools} | fields
    prepared = prepare(pipeline, parse_chat(body, ParserSettings(4096)))
    (tokens,) = prepared.prompts
    return tokens, tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize(("name", "chat", "thinking"), CASES)
def test_prompt_of_a_request_is_that_of_transformers(references, name, chat, thinking):
    reference = references(name)
    messages, tools = CHATS[chat]
    variables = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
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
def test_chat_without_a_system_message_in_its_prompt_is_refused(references, name, chat):
    with pytest.raises(ApiError, match=r"System role not supported|leaves out messages\[0\]"):
        prompt_of(references(name), *CHATS[chat])
