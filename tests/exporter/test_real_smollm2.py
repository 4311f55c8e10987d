"""SmolLM2-135M-Instruct: float32 texts, tokens and chats are transformers' own; int8 is near.

The reference tokenizer is transformers' conversion of the same file. It splits some white space
otherwise than llama.cpp, whose ids are ours: two such texts are compared with llama.cpp's ids.
"""

import hashlib
import json

import pytest

import reference
from real import LENGTH

pytestmark = pytest.mark.slow

INT8_DIVERGENCE = 0.005  # mean KL of prose, chat and code
DIALOGUES = reference.dialogues()
CHATS = DIALOGUES[:2] + DIALOGUES[3:]
# Of the tokens that llama-cpp-python 0.3.36 has of `split_text`.
LLAMA_CPP_SHA256 = "c37b99988b267aed39044ee5e6fd7a4a312cc725e5900b9a7d7f402df175a008"
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


@pytest.fixture
def pipeline(smollm2):
    return smollm2.pipeline("fp32")


def test_greedy_text_equals_transformers(smollm2, pipeline):
    for prompt in smollm2.prompts():
        smollm2.check_greedy(prompt, pipeline.generate(prompt, LENGTH, ignore_eos=True).tokens)


def test_text_is_same_for_every_k(smollm2):
    smollm2.check_every_k("fp32", smollm2.prompts()[::6])


@pytest.mark.usefixtures("all_cpus")
def test_text_in_int8_is_same_for_every_k(smollm2):
    smollm2.check_every_k("int8", smollm2.prompts()[::4])


@pytest.mark.slow(exhaustive=True)
def test_text_of_other_prompts_is_same_for_every_k(smollm2):
    smollm2.check_every_k("fp32", [p for i, p in enumerate(smollm2.prompts()) if i % 6])


def test_divergence_of_int8_is_within_its_bound(smollm2, tmp_path, report):
    divergence = smollm2.divergence("int8", tmp_path)
    report(f"SmolLM2 int8: KL {divergence:.4f}")
    assert divergence <= INT8_DIVERGENCE


@pytest.mark.parametrize("text", TEXTS, ids=map(str, range(len(TEXTS))))
def test_text_tokens_equal_transformers(smollm2, pipeline, text):
    tokens = smollm2.tokenizer(text)["input_ids"]
    assert pipeline.tokenizer.encode(text).ids == tokens
    decoded = smollm2.tokenizer.decode(tokens, skip_special_tokens=True)
    assert pipeline.tokenizer.decode(tokens) == decoded


def split_text():
    """Return a dialogue and code whose whitespace transformers splits differently."""
    lines = (reference.TEXTS / "prompts.jsonl").read_text("utf-8").splitlines()
    code = [prompt["text"] for prompt in map(json.loads, lines) if prompt["kind"] == "code"]
    return "\n\n".join([*(message["content"] for message in DIALOGUES[2]), *code])


def test_whitespace_tokens_equal_llama_cpp(pipeline):
    ids = pipeline.tokenizer.encode(split_text()).ids
    assert hashlib.sha256(json.dumps(ids).encode()).hexdigest() == LLAMA_CPP_SHA256


@pytest.mark.parametrize("messages", [*(d[:-1] for d in CHATS), SYSTEM])
def test_chat_tokens_equal_transformers(smollm2, pipeline, messages):
    expected = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert pipeline.prompts.chat_tokens(messages) == list(expected["input_ids"])
