"""Exported pairs through the runtime: plain, speculative and transformers' greedy tokens."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import specedge
from cases import exhaustive, slow
from checkpoints import greedy_tokens

PROMPTS = {"embedded": "def read_config(path):"}  # for the others, any tokens
LENGTH = 200
NEAR = 1e-4  # of the logits' standard deviation: float32 rounding by summation order
NEAR_ROUNDED = 0.1  # and what int8 may


SLOW = [
    pytest.param(x, marks=pytest.mark.slow(exhaustive=x != "bfloat16"))
    for x in ("bfloat16", "llama", "qwen2", "mistral", "padded")
]


@pytest.fixture(params=[slow("embedded"), "gpt2", *SLOW])
def name(request):
    return request.param


@pytest.fixture
def pipeline(name, pairs):
    return specedge.load(pairs.bundle(name).folder)


@pytest.fixture
def prompt(name, pipeline):
    return pipeline.tokenizer.encode(PROMPTS[name]).ids if name in PROMPTS else range(40, 52)


def plain(pipeline, prompt):
    return pipeline.generate(prompt, LENGTH, num_draft_tokens=0, ignore_eos=True)


@pytest.mark.parametrize("name", ["gpt2", exhaustive("embedded"), *SLOW], indirect=True)
def test_speculative_tokens_equal_plain_decoding(pipeline, name, prompt, report):
    expected = plain(pipeline, prompt).tokens
    assert len(set(expected)) >= 25
    for k in (1, 4, 8):
        one = pipeline.generate(prompt, LENGTH, num_draft_tokens=k, ignore_eos=True)
        assert one.tokens == expected, k
        rate = one.stats.accepted_over_tested
        report(f"{name}, K = {k}: acceptance {rate:.2f}, {len(set(expected))} distinct tokens")
        assert 0.3 < rate < 0.9


def test_tokens_equal_greedy_generate_of_transformers(pipeline, name, prompt, pairs, report):
    """Differences are near-ties within rounding; each is reported."""
    length = LENGTH // 2
    tokens = plain(pipeline, prompt).tokens[:length]
    model = AutoModelForCausalLM.from_pretrained(pairs.checkpoint(name)[1], dtype=torch.float32)
    generated = greedy_tokens(model, [*prompt], length)
    first = next((i for i in range(length) if tokens[i] != generated[i]), length)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :].numpy()
    flips = [i for i in range(length) if int(np.argmax(logits[i])) != tokens[i]]
    for i in flips:
        margin = float((logits[i].max() - logits[i][tokens[i]]) / logits[i].std())
        report(f"{name}: near-tie against transformers at token {i}, margin {margin:.1e}")
        assert margin < (NEAR_ROUNDED if pipeline.bundle.target.quantization else NEAR)
    assert first == length or first in flips


@pytest.mark.slow(exhaustive=True)
def test_ids_beyond_tokenizer_have_no_logits(pairs):
    model = pairs.bundle("padded").target
    assert (model.vocab_size, model.padded_vocab_size) == (512, 520)
    pipeline = specedge.load(pairs.bundle("padded").folder)
    assert pipeline.target.forward([1, 2]).array().shape == (2, 512)


@pytest.mark.parametrize("name", ["gpt2", exhaustive("embedded"), *SLOW], indirect=True)
def test_context_fills_to_its_last_position(pipeline, prompt):
    context = pipeline.bundle.context_length
    long = ([*prompt] * context)[: context - 9]
    one = pipeline.generate(long, 99, num_draft_tokens=4, ignore_eos=True)
    expected = pipeline.generate(long, 99, num_draft_tokens=0, ignore_eos=True)
    assert (len(one.tokens), one.finish_reason) == (9, "context")
    assert one.tokens == expected.tokens
