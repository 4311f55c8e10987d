"""Chats are rendered, and special tokens shipped, as transformers has them."""

import copy
import dataclasses
import json
import shutil

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from corpus import train_tokenizer
from specedge.bundle import Bundle, store
from specedge.chat_templates import chat_template_of, combine, read_template
from specedge.errors import ExportError
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints
from specedge.exporter.tokenizers import pair
from specedge.runtime.text.chat import render
from specedge.runtime.text.prompts import Prompts
from templates import QUESTION, SPECIAL, SYSTEM, TEMPLATES, TURNS


@pytest.fixture(scope="module")
def reference():
    """transformers' tokenizer, which begins a plain text with <s>."""
    backend = train_tokenizer(["What is the question? <|user|> assistant"] * 3, 300)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)
    ids = wrapped.convert_tokens_to_ids("<s>")
    backend = wrapped.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", ids)])
    assert wrapped("a")["input_ids"][0] == ids
    return wrapped


@pytest.fixture
def bundle(reference):
    return dataclasses.replace(
        Bundle.read(store.embedded_folder()), special_tokens=dict(reference.special_tokens_map)
    )


CASES = [(name, chat) for name in TEMPLATES for chat in (QUESTION, TURNS, SYSTEM)]
CASES.remove(("Gemma", SYSTEM))  # it refuses; test_chat.py has what is said then


@pytest.mark.parametrize(("name", "messages"), CASES)
def test_rendered_text_and_tokens_equal_transformers(reference, bundle, name, messages):
    ours = dataclasses.replace(bundle, chat_template=TEMPLATES[name])
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": True}
    text = reference.apply_chat_template(messages, tokenize=False, **options)
    assert render(ours, messages) == text
    ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert Prompts(ours, reference.backend_tokenizer).chat_tokens(messages) == ids


FIRST = "\n{%- macro show(m) %}<{{ m.content }}>{% endmacro %}\n{{ tools | tojson }} "
FIRST += "{% for m in messages %}\n  {{ show(m) }}\n{% endfor %}\n  \n"
NAMED = {"default": "  {% set a = 1 %}\n {{ a }}{{ messages[0].content }}\n\n", "tool_use": FIRST}


@pytest.mark.parametrize("tools", [None, [], [{"type": "function"}]])
def test_named_template_selection_matches_transformers(reference, bundle, tools):
    ours = dataclasses.replace(bundle, chat_template=combine(NAMED))
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
    with_names = copy.copy(reference)
    with_names.chat_template = NAMED
    assert render(ours, QUESTION, tools) == with_names.apply_chat_template(QUESTION, **options)


LISTED = [{"name": name, "template": text} for name, text in NAMED.items()]
JINJA = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.json": {"chat_template": "{{ messages }}"}}, "{{ messages }}"),
        ({"chat_template.json": {"chat_template": LISTED}}, combine(NAMED)),
        (dict(zip(JINJA, ("{{ 1 }}", "{{ 2 }}"), strict=True)),
         combine({"default": "{{ 1 }}", "tool_use": "{{ 2 }}"})),
        ({"chat_template.json": {"chat_template": "{{ 1 }}"}, JINJA[0]: "{{ 2 }}"}, "{{ 2 }}"),
        ({"tokenizer_config.json": {"chat_template": LISTED}}, combine(NAMED)),
        ({"chat_template.json": {}}, None),
    ],
)  # fmt: skip
def test_template_is_loaded_from_every_supported_file(pairs, tmp_path, files, template):
    folder = shutil.copytree(pairs.checkpoint("gpt2")[1], tmp_path / "target")
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if name == "tokenizer_config.json":
            value = json.loads(path.read_text("utf-8")) | value
        path.write_text(value if name.endswith(".jinja") else json.dumps(value), "utf-8")
    target = checkpoints.find("target", str(folder), None)
    assert pair.check_pair(None, target, Progress()).chat_template == template
    assert read_template(folder / "tokenizer_config.json") == chat_template_of(
        files.get("tokenizer_config.json", {}).get("chat_template")
    )


def test_invalid_json_template_file_is_one_line_error(pairs, tmp_path):
    folder = shutil.copytree(pairs.checkpoint("gpt2")[1], tmp_path / "target")
    (folder / "chat_template.json").write_text("{", "utf-8")
    with pytest.raises(ExportError, match=r"chat_template.json is not valid JSON: Expecting"):
        pair.check_pair(None, checkpoints.find("target", str(folder), None), Progress())


def test_templates_without_a_default_or_text():
    assert combine({"tool_use": "a"}) == "a"
    assert combine({"rag": "a"}) is None
    assert chat_template_of(3) is None
    assert chat_template_of([3, {"name": "default", "template": 3}]) is None


def test_embedded_pair_states_its_checkpoints_special_tokens(pairs):
    target = checkpoints.find("target", str(pairs.checkpoint("embedded")[1]), None)
    manifest = json.loads((store.embedded_folder() / "bundle.json").read_text("utf-8"))
    assert manifest["special_tokens"] == target.tokenizer.special_tokens_map


def test_deeply_nested_file_is_a_value_error(tmp_path):
    path = tmp_path / "chat_template.json"
    path.write_text("[" * 10**5, "utf-8")
    with pytest.raises(ValueError, match="nested"):
        read_template(path)
