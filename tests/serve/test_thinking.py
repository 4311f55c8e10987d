"""Thinking: its markers in generated text, its switches, and grammars that begin after it."""

import json

import pytest

from served import MODEL, client, serving
from specedge.serve.reasoning import (
    FORMATS,
    ReasoningDelta,
    ReasoningParser,
    ThinkingFormat,
)
from tool_pairs import scripted_pair

MESSAGES = [{"role": "user", "content": "2+2?"}]
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
# As Qwen3's: thinks unless enable_thinking is false; history keeps reasoning_content.
HYBRID = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}{{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}
{%- endif %}{%- endif %}"""
# The same, with tools and calls.
CALLING = "{{ tools }}" + HYBRID.replace(
    "{{- message.content + '<|im_end|>\n' }}",
    "{{- message.content }}{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}{{- '<|im_end|>\n' }}",
)
# As DeepSeek-R1's: the prompt ends within the thinking.
ALWAYS = HYBRID.partition("{%- if enable_thinking")[0] + "{{- '<think>\n' }}{%- endif %}"
TOKENS = {"<think>": False, "</think>": False}


@pytest.fixture(scope="module")
def hybrid():
    pipeline = scripted_pair(HYBRID, TOKENS)
    with serving(pipeline, model=MODEL) as port, client(port) as ai:
        yield pipeline, ai


@pytest.fixture(scope="module")
def always():
    pipeline = scripted_pair(ALWAYS, TOKENS)
    with serving(pipeline, model=MODEL) as port, client(port) as ai:
        yield pipeline, ai


def read(pieces, thinking, is_open=False):
    parser = ReasoningParser(thinking, is_open)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.end()
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningDelta))
    return reasoning, "".join(part for part in parts if isinstance(part, str))


def cuts(text):
    return [[text], [*text], *([text[:i], text[i:]] for i in range(1, len(text)))]


@pytest.mark.parametrize("thinking", FORMATS)
def test_reasoning_is_separated_for_any_chunk_boundaries(thinking):
    opening, closing = thinking.opening, thinking.closing
    cases = [
        (f"{opening}\n2+2\n\nis < 5\n{closing}\n\n4 <t", False, ("2+2\n\nis < 5", "4 <t")),
        (f"2+2{closing}4", True, ("2+2", "4")),
        (f"2+2{closing[:-1]}", True, (f"2+2{closing[:-1]}", "")),
        (f"4 {opening} no", False, ("", f"4 {opening} no")),
        (f"{opening}{closing}4\n", False, ("", "4\n")),
        (opening[:-1], False, ("", opening[:-1])),
    ]
    for text, is_open, expected in cases:
        for pieces in cuts(text):
            assert read(pieces, thinking, is_open) == expected


def test_reasoning_and_content_are_separate(hybrid):
    pipeline, ai = hybrid
    pipeline.text = "<think>\nTwo and two.\n</think>\n\nFour."
    message = ai.chat.completions.create(**ASKED).choices[0].message
    assert (message.reasoning_content, message.reasoning) == ("Two and two.",) * 2
    assert message.content == "Four."
    deltas = [chunk.choices[0].delta for chunk in ai.chat.completions.create(stream=True, **ASKED)]
    assert "".join(getattr(d, "reasoning_content", "") or "" for d in deltas) == "Two and two."
    assert "".join(delta.content or "" for delta in deltas) == "Four."


def test_reasoning_can_be_disabled_by_template_variable(hybrid):
    pipeline, ai = hybrid
    pipeline.text = "Four."
    prompts = {}
    for name, body in {
        "plain": {},
        "on": {"chat_template_kwargs": {"enable_thinking": True}},
        "off": {"chat_template_kwargs": {"enable_thinking": False}},
        "none": {"reasoning_effort": "none"},
    }.items():
        message = ai.chat.completions.create(extra_body=body, **ASKED).choices[0].message
        assert (message.content, getattr(message, "reasoning_content", None)) == ("Four.", None)
        prompts[name] = pipeline.asked_text
    assert prompts["plain"] == prompts["on"]
    assert prompts["off"] == prompts["none"] == prompts["plain"] + "<think>\n\n</think>\n\n"


def test_reasoning_of_history_is_rendered_by_template(hybrid):
    pipeline, ai = hybrid
    pipeline.text = "Yes."
    history = [*MESSAGES, {"role": "assistant", "content": "4", "reasoning_content": "2+2"}]
    ai.chat.completions.create(**ASKED | {"messages": [*history, *MESSAGES]})
    prompt = pipeline.asked_text
    assert "<think>\n2+2\n</think>\n\n4" in prompt


def test_prompt_ending_in_open_reasoning_starts_reasoning(always):
    pipeline, ai = always
    pipeline.text = "Two and two.\n</think>\n\nFour."
    message = ai.chat.completions.create(**ASKED).choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")
    response = ai.responses.create(model=MODEL, input="2+2?", temperature=0)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Two and two."
    assert response.output_text == "Four."
    with ai.responses.stream(model=MODEL, input="2+2?", temperature=0) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
    assert text == "Two and two."
    assert events[-1].response.output == stream.get_final_response().output
    assert [event.sequence_number for event in events] == list(range(len(events)))


def count(pipeline, text):
    return len(pipeline.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_tokens_are_counted_up_to_end_marker(always, stream):
    pipeline, ai = always
    thought, rest = "Two and two.\n</think>", "\n\nFour."
    pipeline.text = thought + rest
    asked = ASKED | ({"stream_options": {"include_usage": True}} if stream else {})
    response = ai.chat.completions.create(stream=stream, **asked)
    usage = (list(response)[-1] if stream else response).usage
    expected = count(pipeline, thought)
    assert usage.completion_tokens_details.reasoning_tokens == expected
    assert count(pipeline, thought + rest) <= usage.completion_tokens
    response = ai.responses.create(model=MODEL, input="2+2?", temperature=0)
    assert response.usage.output_tokens_details.reasoning_tokens == expected
    usage = ai.chat.completions.create(**ASKED | {"max_tokens": 2}).usage
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == 2


def test_text_truncated_within_reasoning_has_no_content(always):
    pipeline, ai = always
    pipeline.text = "Two and two and two and two.\n</think>\n\nFour."
    choice = ai.chat.completions.create(**ASKED | {"max_tokens": 4}).choices[0]
    assert choice.finish_reason == "length"
    assert pipeline.text.startswith(choice.message.reasoning_content)
    assert choice.message.content == ""


SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "speculative", [{"off": True}, {"num_draft_tokens": 4}, {"drafter": "suffix"}]
)
def test_response_format_begins_after_thinking(always, speculative):
    pipeline, ai = always
    pipeline.text = None
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    close = pipeline.tokenizer.token_to_id("</think>")
    choice = ai.chat.completions.create(
        response_format=form,
        extra_body={"speculative": speculative, "logit_bias": {str(close): 20}},
        **ASKED,
    ).choices[0]
    assert json.loads(choice.message.content)["n"] in (1, 2)
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    "constraint",
    [{"regex": "a/b+"}, {"guided_choice": ["a/b"]}, {"grammar": 'start: x\nx: "a/b"'}],
)
def test_grammars_begin_after_thinking(always, constraint):
    pipeline, ai = always
    pipeline.text = None
    close = pipeline.tokenizer.token_to_id("</think>")
    body = constraint | {"logit_bias": {str(close): 20}}
    message = ai.chat.completions.create(extra_body=body, **ASKED).choices[0].message
    assert message.content.startswith("a/b")


def test_disabled_reasoning_leaves_grammar_unchanged(hybrid):
    pipeline, ai = hybrid
    pipeline.text = None
    body = {"regex": "a/b+", "reasoning_effort": "none"}
    message = ai.chat.completions.create(extra_body=body, **ASKED).choices[0].message
    assert message.content.startswith("a/b")


def test_plain_text_reasoning_markers_are_supported():
    pipeline = scripted_pair(ALWAYS)
    with serving(pipeline, model=MODEL) as port, client(port) as ai:
        pipeline.text = "Two.</think>Four."
        message = ai.chat.completions.create(**ASKED).choices[0].message
        assert (message.reasoning_content, message.content) == ("Two.", "Four.")
        pipeline.text = None
        message = ai.chat.completions.create(extra_body={"regex": "(a/b)+"}, **ASKED).choices[0]
    assert message.finish_reason in ("stop", "length")


def test_gemma_reasoning_marker_is_detected_in_prompt():
    gemma = ThinkingFormat("<|channel>thought\n", "<channel|>")
    assert gemma.delimiters == ("<|channel>", "<channel|>")
    assert gemma.is_open("<|turn>model\n<|channel>thought\n")
    assert gemma.is_closed("<|channel>thought\n<channel|>")
