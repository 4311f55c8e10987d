"""Pairs whose draft has another tokenizer, exported and run: a SentencePiece BPE beside GPT-2's."""

import argparse
import inspect
import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)  # fmt: skip
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import specedge
from auditing import passed_checks
from cases import slow
from checkpoints import add_noise, make_config, make_model, make_tokenizer, save
from specedge.benchmarks.acceptance import acceptances
from specedge.bundle.gpu_signatures import ONE_CALL
from specedge.cli import cli
from specedge.errors import BundleError, ExportError
from specedge.exporter import Progress, export
from specedge.exporter.hosts.host_graphs import embed
from specedge.exporter.tokenizers.vocabulary_map import map_vocabularies
from specedge.sampling_options import Sampling

CONTEXT = 128
PROMPT = "def parse(self, naïve):\n    return ["
SIZES = {"layers": 1, "context": CONTEXT, "kv_heads": 2}


def sentencepiece():
    """A tokenizer with byte fallback that adds a token before a text."""
    texts = [inspect.getsource(module).replace(" ", "▁") for module in (argparse, inspect, json)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?\w+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=330, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [tuple(merge) for merge in model["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


class Made:
    """A draft that is the target with noise, whose rows are those of equal tokens."""

    def __init__(self, folder, precision):
        tokenizer, draft_tokenizer = make_tokenizer(folder / "tokenizer"), sentencepiece()
        target = make_model(make_config("llama", **SIZES))
        config = make_config("llama", **SIZES, vocab_size=len(draft_tokenizer))
        draft, noisy = make_model(config, seed=3), add_noise(target, 0.02)
        backends = [one.backend_tokenizer for one in (tokenizer, draft_tokenizer)]
        shared = map_vocabularies(*backends, (512, len(draft_tokenizer)), {0: 2})
        weights = noisy.state_dict()
        for name, rows in draft.state_dict().items():
            if rows.shape[0] == len(draft_tokenizer):
                rows[[*shared.draft_ids]] = weights[name][[*shared.target_ids]]
                weights[name] = rows
        draft.load_state_dict(weights)
        self.draft = save(draft, draft_tokenizer, folder / "draft")
        self.target = save(target, tokenizer, folder / "target")
        self.progress = Progress()
        self.bundle = export(
            self.draft, self.target, folder / "bundle",
            precision=precision, ops="gqa", num_draft_tokens=8, progress=self.progress,
        )  # fmt: skip
        self.pipeline = specedge.load(self.bundle.folder)

    def prompt(self):
        return self.pipeline.tokenizer.encode(PROMPT).ids


@pytest.fixture(scope="module")
def made(request, tmp_path_factory):
    return Made(tmp_path_factory.mktemp("tokenizers"), request.param)


EVERY_PRECISION = pytest.mark.parametrize("made", ["fp32", slow("int8")], indirect=True)
FLOAT = pytest.mark.parametrize("made", ["fp32"], indirect=True)


@EVERY_PRECISION
def test_greedy_text_equals_plain_decoding(made):
    options = {"ignore_eos": True, "logprobs": 1}
    plain = made.pipeline.generate(made.prompt(), CONTEXT, num_draft_tokens=0, **options)
    assert len({*plain.tokens}) > 10
    assert not {*plain.tokens} <= {*made.bundle.ids_of(made.bundle.draft)}
    for k in range(1, 9):
        found = made.pipeline.generate(made.prompt(), CONTEXT, num_draft_tokens=k, **options)
        assert (found.tokens, found.logprobs) == (plain.tokens, plain.logprobs)
        assert 0 < found.stats.num_accepted < found.stats.num_drafted
    planned = made.pipeline.generate(made.prompt(), CONTEXT, **options)
    assert planned.tokens == plain.tokens


@EVERY_PRECISION
def test_draft_logits_are_those_of_the_shared_tokens(made):
    bundle, readings = made.bundle, made.bundle.readings()
    read = readings.read(made.prompt())
    assert read[0] == 1
    assert len(read) > len(made.prompt())
    model = AutoModelForCausalLM.from_pretrained(made.draft, dtype=torch.float32)
    with torch.no_grad():
        whole = model(torch.tensor([read])).logits[0].numpy()
    made.pipeline.draft.truncate(0)
    logits = made.pipeline.draft.forward(read)
    names = [readings.of(token) for token in bundle.ids_of(bundle.draft)]
    assert {len(name) for name in names} == {1}
    expected = whole[:, [int(token) for (token,) in names]]
    assert logits.array().shape == expected.shape
    allowed = 0.1 if made.bundle.draft.quantization else 1e-4
    assert np.abs(logits.array() - expected).max() < allowed * np.abs(expected).max()


@FLOAT
def test_manifest_and_notes_describe_the_overlap(made):
    bundle = made.bundle
    draft, count = bundle.draft, len(bundle.ids_of(bundle.draft))
    assert (draft.padded_vocab_size, bundle.target.vocab_size) == (count, 512)
    assert draft.vocab_size == len(sentencepiece()) != 512
    assert draft.tokenizer.prefix == (1,)
    tokenizer = Tokenizer.from_file(str(bundle.path(draft.tokenizer.file)))
    assert tokenizer.get_vocab() == sentencepiece().get_vocab()
    assert any(
        f"the draft has another tokenizer; it can draft {count} of the target's 512" in note
        for note in made.progress.notes
    )
    assert not any(draft.has_graph(name) for name in ONE_CALL)
    result = CliRunner().invoke(cli, ["inspect", "--bundle", str(bundle.folder)])
    assert f"another one: {count} of the target's 512 tokens can be drafted" in result.output


@FLOAT
def test_acceptance_is_measured_through_the_map(made):
    text = made.pipeline.generate(made.prompt(), 60, num_draft_tokens=0, ignore_eos=True).tokens
    greedy = acceptances(made.pipeline, made.prompt(), text, Sampling())
    sampled = acceptances(made.pipeline, made.prompt(), text, Sampling(1.0))
    assert len(greedy) == len(sampled) == 60
    assert np.mean(greedy) > 0.1
    assert np.mean(sampled) > 0.2
    rates = made.bundle.draft.acceptance
    assert rates.greedy > 0.1
    assert rates.sampled > 0.2
    k = {"num_draft_tokens": 1, "ignore_eos": True}
    stats = made.pipeline.generate(made.prompt(), 60, **k).stats
    assert abs(stats.num_accepted / stats.num_drafted - np.mean(greedy)) < 0.2


@FLOAT
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {5: 4.0, 300: 6.0, 511: 5.0}, "bad_words": ["import", "self"]},
        {"min_new_tokens": 20},
        {"regex": "[a-z ]{20,30}"},
        {"json_schema": {"type": "object", "properties": {"naïve": {"type": "integer"}}}},
    ],
    ids=["penalties", "biases and bans", "held back ends", "regex", "schema"],
)
def test_options_keep_the_text(made, options):
    texts = [
        made.pipeline.generate(made.prompt(), 40, num_draft_tokens=k, **options).tokens
        for k in (0, 1, 4)
    ]
    assert texts[0] == texts[1] == texts[2]


@FLOAT
def test_same_seed_yields_same_text_if_truncated_or_after_other_requests(made):
    options = {"temperature": 0.9, "top_k": 40, "seed": 3, "num_draft_tokens": 4}
    prompt = made.prompt()
    whole = made.pipeline.generate(prompt, CONTEXT, ignore_eos=True, **options)
    assert 0 < whole.stats.num_accepted < whole.stats.num_drafted
    for count in (1, 20, 37):
        found = made.pipeline.generate(prompt, count, ignore_eos=True, **options)
        assert found.tokens == whole.tokens[:count]
    made.pipeline.generate(prompt[:5], 9, num_draft_tokens=2)
    found = made.pipeline.generate(prompt, CONTEXT, ignore_eos=True, **options)
    assert found.tokens == whole.tokens


@FLOAT
def test_host_graphs_are_refused_by_name(made, tmp_path):
    with pytest.raises(ExportError, match=r"draft has another tokenizer than .*target"):
        embed(made.bundle.folder, tmp_path / "hosts")


@FLOAT
def test_damaged_readings_are_refused(made, tmp_path):
    import shutil

    folder = shutil.copytree(made.bundle.folder, tmp_path / "bundle")
    path = folder / made.bundle.draft.tokenizer.readings
    size = path.stat().st_size
    path.write_bytes(b"\xff" * size)
    with pytest.raises(BundleError, match="SHA-256 differs"):
        specedge.load(folder)


@FLOAT
def test_reduced_vocabulary_keeps_the_most_frequent_shared_tokens(made, tmp_path):
    progress = Progress()
    bundle = export(
        made.draft, made.target, tmp_path / "bundle",
        draft_vocab=100, ops="gqa", progress=progress,
    )  # fmt: skip
    ids = bundle.ids_of(bundle.draft)
    assert len(ids) == 100
    assert {*ids} < {*made.bundle.ids_of(made.bundle.draft)}
    pipeline = specedge.load(bundle.folder)
    texts = [
        pipeline.generate(made.prompt(), 40, num_draft_tokens=k, ignore_eos=True).tokens
        for k in (0, 3)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow(exhaustive=True)
@EVERY_PRECISION
def test_audit_passes(made):
    assert len(passed_checks(made.bundle)) == 9
