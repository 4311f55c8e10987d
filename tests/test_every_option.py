"""Greedy text under every sampling option: fifty prompts at every K."""

from itertools import islice

import pytest

from corpus import held_out_prompts

EVERY_OPTION = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "logit_bias": {10: -5.0, 40: 1.5, 300: -100.0},
    "bad_words": ["self", "return None", "import os"],
    "min_new_tokens": 150,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
    "typical_p": 0.9,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def plain(pipeline):
    """Fifty prompts of held-out code, with 200 tokens of the target alone."""
    held_out = list(islice(held_out_prompts(pipeline.tokenizer), 50))
    texts = [*held_out, *(text[:48] for text in held_out)][:50]
    assert len(texts) == 50
    return [
        (text, pipeline.generate(text, 200, num_draft_tokens=0, **EVERY_OPTION)) for text in texts
    ]


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("k", [1, 2, 4, 8, "auto"])
def test_greedy_tokens_with_every_option_equal_plain_decoding(pipeline, plain, k, report):
    drafted = accepted = 0
    for text, alone in plain:
        one = pipeline.generate(text, 200, num_draft_tokens=k, **EVERY_OPTION)
        assert one.tokens == alone.tokens
        assert one.logprobs == alone.logprobs
        assert (one.text, one.finish_reason) == (alone.text, alone.finish_reason)
        drafted, accepted = drafted + one.stats.num_drafted, accepted + one.stats.num_accepted
    length = sum(len(alone.tokens) for _, alone in plain)
    report(f"every option, K = {k}: {length} tokens equal, {accepted} of {drafted} drafts accepted")
    assert accepted
