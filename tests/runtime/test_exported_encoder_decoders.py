"""Exported encoder-decoders: their texts are transformers'."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import specedge
from cases import exhaustive, slow
from encoder_decoders import CONFIGS, make_encoder_decoder
from specedge.exporter import export

PROMPTS = ("translate: the house is wonderful", "def f(x):\n    return x")
LENGTH = 100
FAMILIES = [name for name in CONFIGS if name not in ("t5", "nllb", "whisper")]


@pytest.fixture(scope="module", params=["t5", slow("nllb"), *map(exhaustive, FAMILIES)])
def exported(request, tmp_path_factory):
    """A loaded bundle, and the target in PyTorch."""
    folder = tmp_path_factory.mktemp(request.param)
    target = make_encoder_decoder(request.param, folder / "target")
    draft = make_encoder_decoder(request.param, folder / "draft", noise=0.05)
    export(draft, target, folder / "bundle", precision="fp32")
    with specedge.load(folder / "bundle") as pipeline:
        yield pipeline, AutoModelForSeq2SeqLM.from_pretrained(target).eval()


def test_acceptance_rates_are_those_of_the_answers(exported):
    pipeline, _ = exported
    rates = pipeline.bundle.draft.acceptance
    assert 0 < rates.sampled < 0.9999


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_transformers(exported, prompt):
    pipeline, model = exported
    source, first = pipeline.prompts.tokens(prompt), pipeline.prompts.decoder_tokens()
    num_new = LENGTH + len(first) - 1
    lengths = {"max_new_tokens": num_new, "min_new_tokens": num_new, "forced_eos_token_id": None}
    (expected,) = model.generate(torch.tensor([source]), num_beams=1, do_sample=False, **lengths)
    assert expected[: len(first)].tolist() == first
    options = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH}
    for k in (0, 1, 4, 8):
        for drafter in ("model", "suffix", "chain") if k else ("auto",):
            generation = pipeline.generate(prompt, num_draft_tokens=k, drafter=drafter, **options)
            assert generation.tokens == expected[len(first) :].tolist()
