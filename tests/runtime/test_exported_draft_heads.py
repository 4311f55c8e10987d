"""Exported EAGLE-3 heads: text is the target's, alone and in slots that share passes."""

import numpy as np
import pytest

import eagle_heads
import specedge
from auditing import check_power, passed_checks
from cases import slow
from checkpoints import make_checkpoint, make_tokenizer
from quantized import check_greedy
from specedge.bundle import Bundle
from specedge.exporter import export

PROMPTS = ([5, 8, 13, 21, 34], [9, 9, 9, 4, 5, 6, 7], [*range(10, 60)])
OPTIONS = {"max_new_tokens": 40, "ignore_eos": True}
SAFEAILAB = eagle_heads.HeadSpec(eagle_heads.SAFEAILAB, vocab_size=512, columns=100)
SPECULATORS = eagle_heads.HeadSpec(vocab_size=512, columns=512, num_layers=2, norm_output=True)
EXPORTS = [
    (SAFEAILAB, "fp32"),
    slow((SAFEAILAB, "int8")),
    slow((SPECULATORS, "fp32")),
    slow((SPECULATORS, "int8")),
]
IDS = ["safeailab", "safeailab-int8", "speculators", "speculators-int8"]


@pytest.fixture(scope="module", params=EXPORTS, ids=IDS)
def folder(request, tmp_path_factory):
    spec, precision = request.param
    folder = tmp_path_factory.mktemp("head")
    tokenizer = make_tokenizer(folder / "tokenizer")
    target = make_checkpoint(folder / "target", "llama", tokenizer, layers=6, hidden=32, kv_heads=2)
    head = eagle_heads.write_head(folder / "head", spec)
    export(head, target, folder / "bundle", ops="gqa", num_draft_tokens=3, precision=precision)
    return folder / "bundle"


@pytest.fixture(scope="module")
def pair(folder):
    with specedge.load(folder) as pipeline:
        yield pipeline


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_text_equals_plain_decoding(pair, prompt, k):
    check_greedy(pair, prompt, 40, k)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("drafter", ["chain", "auto"])
def test_greedy_text_of_other_drafters_equals_plain_decoding(pair, prompt, drafter):
    expected = pair.generate(prompt, num_draft_tokens=0, **OPTIONS).tokens
    assert pair.generate(prompt, drafter=drafter, **OPTIONS).tokens == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_rows_after_rejections_are_those_of_a_new_head(pair, prompt):
    generation = pair.generate(prompt, temperature=1.0, seed=1, num_draft_tokens=3, **OPTIONS)
    assert 0 < generation.stats.num_accepted < generation.stats.num_tested
    text, num_rows = [*prompt, *generation.tokens], pair.draft.observed.num_rows
    assert pair.draft.observed.start == 0
    assert num_rows > len(text) - 6
    target, draft = pair.target.with_new_cache(), pair.draft.with_new_cache()
    target.prefill(text)
    draft.prefill(text[1 : num_rows + 1], draft.fuse(target.hidden)[:num_rows])
    pairs = zip(pair.draft.cache_rows(0, num_rows), draft.cache_rows(0, num_rows), strict=True)
    for rows, expected in pairs:
        np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_slots_that_share_passes_give_the_text_of_each_request(folder, pair, temperature):
    options = OPTIONS | {"temperature": temperature, "num_draft_tokens": 3}
    expected = [
        pair.generate(prompt, seed=3 + i, **options).tokens
        for i, prompt in enumerate([*PROMPTS, *PROMPTS])
    ]
    with specedge.load(folder, slots=2) as pipeline:
        assert pipeline.target.batch is not None
        results = pipeline.generate_batch([*PROMPTS, *PROMPTS], seed=3, **options)
    assert [result.tokens for result in results] == expected


@pytest.mark.slow
@pytest.mark.parametrize("folder", [(SAFEAILAB, "fp32")], indirect=True, ids=["safeailab"])
def test_audit_passes(folder):
    findings = passed_checks(Bundle.read(folder))
    assert len(findings) == 9
    check_power(findings)
