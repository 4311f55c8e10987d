"""Chat templates of the target: rendering, errors and generation."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest

import specedge
from installed import run
from specedge import BundleError, PromptError
from specedge.bundle import MANIFEST, Bundle, store
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.text.chat import render
from specedge.runtime.text.messages import TemplateOptions
from templates import CHATML, GEMMA, LLAMA_2, QUESTION, SPECIAL, SYSTEM, TOOLS, ZEPHYR

HELLO = [{"role": "user", "content": "Hi"}]


def with_template(template, **special):
    bundle = Bundle.read(store.embedded_folder())
    return dataclasses.replace(bundle, chat_template=template, special_tokens=SPECIAL | special)


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (CHATML, HELLO, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (ZEPHYR, HELLO, "<|user|>\nHi</s>\n<|assistant|>\n"),
        (GEMMA, HELLO, "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"),
        (
            "{{ messages[0].content | tojson }}",
            QUESTION,
            json.dumps(QUESTION[0]["content"], ensure_ascii=False),
        ),
    ],
)
def test_a_template_renders_the_targets_prompt(template, messages, text):
    assert render(with_template(template), messages) == text


def test_special_tokens_that_a_tokenizer_lacks_are_empty():
    bundle = dataclasses.replace(with_template("[{{ bos_token }}]"), special_tokens={})
    assert render(bundle, HELLO, check_visible=False) == "[]"


@pytest.mark.parametrize(
    ("template", "messages", "error", "said"),
    [
        (None, HELLO, PromptError, "has no chat template; omit --chat"),
        (GEMMA, SYSTEM, PromptError, "rejects these messages: System role not supported"),
        (LLAMA_2, HELLO * 2, PromptError, "roles must alternate"),
        ("a\n{% if %}", HELLO, BundleError, r"template is invalid: .*\(line 2\)"),
        ("{% break %}", HELLO, BundleError, "template is invalid"),
        ("{{ " + "(" * 400 + "1" + ")" * 400 + " }}", HELLO, BundleError, "template is invalid"),
        ("{{ " + "9" * 6000 + " }}", HELLO, BundleError, "template is invalid"),
        ("{{ x | nothing }}", HELLO, BundleError, "No filter named 'nothing'"),
        ("{{ raise_exception('one\n\ntwo') }}", HELLO, PromptError, "messages: one two$"),
        ("{{ messages + 1 }}", HELLO, PromptError, "fails on these messages"),
        ("{{ nothing.at.all }}", HELLO, PromptError, "fails on these messages: 'nothing'"),
        ("{{ messages.append(1) }}", HELLO, PromptError, "not safely|unsafe"),
        ("{{ ''.__class__.__mro__ }}", HELLO, PromptError, "unsafe"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", HELLO, PromptError, "cannot hold '_x'"),
        ("{{ namespace(__class__=1) }}", HELLO, PromptError, "cannot hold '__class__'"),
        ("{{ dict.__globals__.os }}", HELLO, PromptError, "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", HELLO, PromptError, "recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", HELLO, PromptError, "[Rr]ange too big"),
        (CHATML, [], PromptError, "at least one"),
        (CHATML, "Hi", PromptError, "must be a list"),
        (CHATML, ["Hi"], PromptError, r"messages\[0\] must have 'role'"),
        (CHATML, [*HELLO, {"role": "user"}], PromptError, r"messages\[1\] must have 'content'"),
        (CHATML, [{"role": "user", "content": ["a"]}], PromptError, "'content' as text"),
        (CHATML, [HELLO[0] | {"name": object()}], PromptError, "plain values"),
    ],
)  # fmt: skip
def test_template_errors_have_one_line(template, messages, error, said):
    with pytest.raises(error, match=said) as caught:
        render(with_template(template), messages)
    assert "\n" not in str(caught.value)


def test_a_template_cannot_change_the_callers_messages():
    given = [HELLO[0] | {"extra": {"a": 1}}]
    template = "{% set messages = messages + [1] %}{{ messages[0].extra }}"
    text = render(with_template(template), given, check_visible=False)
    assert (text, given) == ("{'a': 1}", [HELLO[0] | {"extra": {"a": 1}}])


def test_jinja_environment_supports_large_templates():
    text = render(with_template(TOOLS), SYSTEM)
    assert re.match(r"<s>Year: \d{4}\nplain 1 <pad>\n", text)
    assert text.endswith("<|assistant|>\n")


@pytest.fixture(scope="module")
def chatty(pipeline):
    """The embedded pair as if it had a template."""
    bundle = dataclasses.replace(pipeline.bundle, chat_template=CHATML)
    return Pipeline(bundle, pipeline.tokenizer, pipeline.target, pipeline.draft)


def test_a_chat_is_the_generation_of_its_rendered_prompt(chatty):
    options = {"max_new_tokens": 30, "temperature": 0.7, "seed": 3}
    answer = chatty.chat(QUESTION, **options)
    prompt = render(chatty.bundle, QUESTION)
    assert answer.tokens == chatty.generate(prompt, **options).tokens
    assert "".join(chatty.stream_chat(QUESTION, **options)) == answer.text
    with pytest.raises(TypeError, match="temprature"):
        chatty.chat(QUESTION, temprature=1)


def test_a_chat_too_long_for_the_context_is_refused(chatty):
    with pytest.raises(specedge.ContextLengthError, match="shorten it"):
        chatty.chat([{"role": "user", "content": "word " * 600}])


@pytest.mark.usefixtures("shared_costs")
def test_a_plain_prompt_needs_no_jinja():
    code = "import sys; sys.modules['jinja2'] = None; import specedge\n"
    code += "print(specedge.load().generate('x', 2).finish_reason)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "length\n"


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded pair with a template."""
    copy = shutil.copytree(store.embedded_folder(), tmp_path / "bundle")
    manifest = json.loads((copy / MANIFEST).read_text("utf-8"))
    manifest["chat_template"] = GEMMA
    (copy / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    return copy


def test_generate_command_supports_chat(folder, pipeline):
    bundle = dataclasses.replace(pipeline.bundle, chat_template=GEMMA)
    expected = pipeline.generate(render(bundle, HELLO), 20, special_tokens=True).text + "\n"
    assert run("generate", "Hi", "--chat", "-n", 20, "--bundle", folder).stdout == expected
    by_stdin = run("generate", "-", "--chat", "-n", 20, "--bundle", folder, stdin="Hi\n")
    assert by_stdin.stdout == expected


def test_template_exception_is_one_line_error(folder):
    result = run("generate", "Hi", "--chat", "--system", "Be brief.", "--bundle", folder)
    assert (result.returncode, result.stdout) == (1, "")
    assert "System role not supported" in result.stderr.splitlines()[-1]


STRINGS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}</>{% endfor %}"
)
SYSTEM_PARTS = (
    "{% if messages[0].role == 'system' %}{% if messages[0] is string %}{{ messages[0] }}"
    "{% else %}[{{ messages[0]['content'][0]['text'] }}]{% endif %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m['content'] is string %}<{{ m.role }}>{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
)
ASSISTANTLESS = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
TURNS_OF_THREE = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (STRINGS, "<system>Be kind.</><user>Hi</><assistant>Hello</>"),
        (PARTS, "<system>Be kind.</><user>Hi</><assistant>Hello</>"),
        (SYSTEM_PARTS, "[Be kind.]<user>Hi<assistant>Hello"),
    ],
)
def test_message_contents_match_template_format(template, text):
    assert render(with_template(template), TURNS_OF_THREE) == text


def test_message_omitted_by_template_is_an_error():
    with pytest.raises(PromptError, match=r"drops messages\[2\], of the role 'assistant'"):
        render(with_template(ASSISTANTLESS), TURNS_OF_THREE)
    assert render(with_template(ASSISTANTLESS), TURNS_OF_THREE[:2]) == "Be kind.Hi"


@pytest.mark.parametrize("calls", [1, "f", [None], [{}], [{"function": 1}], [{"function": {}}]])
def test_omitted_message_with_malformed_calls_is_an_error(calls):
    turns = [*TURNS_OF_THREE[:2], TURNS_OF_THREE[2] | {"tool_calls": calls}]
    with pytest.raises(PromptError, match=r"drops messages\[2\]"):
        render(with_template(ASSISTANTLESS), turns)


CALLS_BY_ITEMS = "{% for k, v in call.arguments | items %}{{ k }}={{ v }};{% endfor %}"
CALLS_BY_SUM = "{{ 'json ' + call.arguments }}"
CALLS_BY_FILTER = "{{ call.arguments | tojson }}"


@pytest.mark.parametrize(
    ("shown", "arguments", "text"),
    [
        (CALLS_BY_FILTER, {"a": "ü"}, '{"a": "ü"}'),
        (CALLS_BY_FILTER, '{"a": "c', '{"a": "c'),
        (CALLS_BY_ITEMS, {"a": "ü"}, "a=ü;"),
        (CALLS_BY_ITEMS, '{"a": "c', 'arguments={"a": "c;'),
        (CALLS_BY_SUM, {"a": "ü"}, 'json {"a": "ü"}'),
        (CALLS_BY_SUM, '{"a": "c', 'json {"a": "c'),
    ],
)
def test_tool_call_arguments_match_template_format(shown, arguments, text):
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        f"{{% set call = c.function %}}{{{{ call.name }}}} {shown}{{% endfor %}}{{% endfor %}}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render(with_template(template), messages) == f"f {text}"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_history_uses_the_templates_key(key):
    template = f"{{% for m in messages %}}{{{{ m.{key} }}}}|{{{{ m.content }}}}{{% endfor %}}"
    message = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert render(with_template(template), [message]) == "2+2|4"


def test_template_options_reach_the_template():
    template = (
        "{% for m in messages %}{{ m.content }}.{% endfor %}{{ enable_thinking }}"
        "{% if add_generation_prompt %}>{% endif %}{{ documents }}"
    )
    options = TemplateOptions({"enable_thinking": False}, documents=[{"title": "a"}])
    assert render(with_template(template), HELLO, options=options) == "Hi.False>[{'title': 'a'}]"
    options = TemplateOptions(continue_final_message=True)
    assert render(with_template(template), HELLO, options=options) == "Hi"
