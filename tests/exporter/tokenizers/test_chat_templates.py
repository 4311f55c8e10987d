"""Chats are rendered, and special tokens shipped, as transformers has them."""

import dataclasses
import json

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from corpus import train_tokenizer
from specedge.bundle import Bundle, store
from specedge.exporter.checkpoint import checkpoints
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
def test_text_and_tokens_are_those_of_transformers(reference, bundle, name, messages):
    ours = dataclasses.replace(bundle, chat_template=TEMPLATES[name])
    options = {"chat_template": TEMPLATES[name], "add_generation_prompt": True}
    text = reference.apply_chat_template(messages, tokenize=False, **options)
    assert render(ours, messages) == text
    ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert Prompts(ours, reference.backend_tokenizer).chat_tokens(messages) == ids


@pytest.mark.slow
def test_special_tokens_of_target_are_shipped(pairs, tmp_path):
    bundle = pairs.bundle("gpt2")
    target = checkpoints.find("target", str(pairs.checkpoint("gpt2")[1]), None)
    assert bundle.special_tokens == target.tokenizer.special_tokens_map != {}


def test_embedded_pair_states_its_checkpoints_special_tokens(pairs):
    target = checkpoints.find("target", str(pairs.checkpoint("embedded")[1]), None)
    manifest = json.loads((store.embedded_folder() / "bundle.json").read_text("utf-8"))
    assert manifest["special_tokens"] == target.tokenizer.special_tokens_map
