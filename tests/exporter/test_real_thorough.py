"""Other precisions of real weights, the whole audit, and Gemma-3-270M where it is cached."""

import pytest
from click.testing import CliRunner

import real_weights
import specedge
from real import LENGTH, Real
from specedge.cli import main

pytestmark = pytest.mark.slow(exhaustive=True)
MOST = {"int8-block": 0.016, "int4": 0.142}  # mean KL of prose, chat and code


@pytest.fixture(scope="module")
def gemma():
    return Real(real_weights.GEMMA, download=False)


@pytest.mark.parametrize("precision", MOST)
def test_divergence_in_blocks_is_within_its_bound(smollm2, precision, tmp_path):
    assert smollm2.divergence(precision, tmp_path) <= MOST[precision]


def test_gemma_greedy_text_equals_transformers(gemma):
    for prompt in gemma.prompts()[::3]:
        pipeline = gemma.pipeline("fp32")
        tokens = pipeline.generate(prompt, LENGTH, num_draft_tokens=0, ignore_eos=True).tokens
        gemma.check_greedy(prompt, list(tokens))
        drafted = pipeline.generate(prompt, LENGTH, ignore_eos=True).tokens
        assert drafted == tokens


def test_gemma_in_int8_is_within_its_bound(gemma, tmp_path):
    gemma.check_every_k("int8", gemma.prompts()[::3])
    assert gemma.divergence("int8", tmp_path) <= 0.006


def test_smollm2_drafts_for_gemma_with_another_tokenizer(smollm2, gemma, report):
    """They share 46,147 tokens, of which the most frequent are kept."""
    folder = real_weights.bundle_of(
        gemma.gguf, "int8", name="gemma-3-270m+smollm2-135m", draft=smollm2.gguf
    )
    pipeline = specedge.load(folder)
    draft = pipeline.bundle.draft
    assert draft.padded_vocab_size == real_weights.DRAFT_VOCAB
    assert draft.tokenizer is not None
    assert draft.acceptance.greedy > 0.2
    tested = accepted = 0
    for prompt in gemma.prompts()[::3]:
        plain, *drafted = (
            pipeline.generate(prompt, LENGTH, num_draft_tokens=k, ignore_eos=True)
            for k in (0, 1, 4, 8, None)
        )
        assert [one.tokens for one in drafted] == [plain.tokens] * 4
        tested += drafted[1].stats.num_tested
        accepted += drafted[1].stats.num_accepted
    report(f"SmolLM2-135M for Gemma-3-270M in int8: acceptance rate {accepted / tested:.2f}")
    assert accepted > 0.2 * tested


def test_full_audit_passes(smollm2):
    result = CliRunner().invoke(
        main, ["verify", "--bundle", str(smollm2.bundle("int8")), "--minutes", "10"]
    )
    assert result.exit_code == 0, result.output
