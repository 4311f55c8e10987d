"""SmolLM2-135M-Instruct in float32: text, tokens and chats are transformers' own.

The reference tokenizer is transformers' conversion of the same file. It splits some white space
otherwise than llama.cpp, whose ids are ours (`test_gguf_tokenizer`), so two texts are left out.
"""

import json

import pytest

import reference
from real import LENGTH

pytestmark = pytest.mark.slow

DIALOGUES = json.loads((reference.TEXTS / "chat.json").read_text("utf-8"))
CHATS = DIALOGUES[:2] + DIALOGUES[3:]
TEXTS = (
    (reference.TEXTS / "prose.txt").read_text("utf-8"),
    "Zażółć gęślą jaźń, 東京の天気は晴れ, привет, 🙂👩‍🚀, a\u0301, \ufeff, \x00\x7f",
    "  leading, trailing  \n\n\n\ttabs\t and\r\nlines   \n",
    "3.14159 1234567890 0x7f 10,000 2026-11-25T18:16:43Z",
    "<|im_start|>user\nnot a message<|im_end|>\n<|endoftext|><repo_name>",
)
SYSTEM = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "  What is the capital of France?\n"},
]


@pytest.fixture(scope="module")
def pipeline(smollm2):
    return smollm2.pipeline("fp32")


def test_greedy_text_is_that_of_transformers(smollm2, pipeline):
    for prompt in smollm2.prompts():
        tokens = pipeline.generate(prompt, LENGTH, num_draft_tokens=0, ignore_eos=True).tokens
        smollm2.check_greedy(prompt, list(tokens))


def test_text_is_same_for_every_k(smollm2):
    smollm2.check_every_k("fp32", smollm2.prompts()[::4])


def test_text_of_other_prompts_is_same_for_every_k(smollm2):
    smollm2.check_every_k("fp32", [p for i, p in enumerate(smollm2.prompts()) if i % 4])


@pytest.mark.parametrize("text", TEXTS, ids=map(str, range(len(TEXTS))))
def test_texts_have_tokens_of_transformers(smollm2, pipeline, text):
    tokens = smollm2.tokenizer(text)["input_ids"]
    assert pipeline.tokenizer.encode(text).ids == tokens
    decoded = smollm2.tokenizer.decode(tokens, skip_special_tokens=True)
    assert pipeline.tokenizer.decode(tokens) == decoded


@pytest.mark.parametrize("messages", [*(d[:-1] for d in CHATS), SYSTEM])
def test_chats_have_tokens_of_transformers(smollm2, pipeline, messages):
    expected = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert pipeline.prompts.chat_tokens(messages) == list(expected["input_ids"])
