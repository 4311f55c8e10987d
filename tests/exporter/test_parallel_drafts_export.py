"""Parallel drafts (PARD): export, and generation with the exported pair."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import specedge
from checkpoints import VOCAB_SIZE, add_noise, make_config, make_model, make_tokenizer, save
from quantized import check_greedy
from specedge.cli.embed import add_graphs
from specedge.errors import CheckpointError, ExportError
from specedge.exporter import Progress, export
from specedge.exporter.quantization.draft_acceptance import acceptance_by_row, draft_in_parallel
from specedge.exporter.quantization.float_model import FloatModel
from specedge.exporter.quantization.report import compute_logits
from specedge.request import item_seed
from specedge.runtime.drafters.draft_model import ParallelDraftModel
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

K = 8
MASK = VOCAB_SIZE + 3  # in the embedding, but not in the tokenizer, as Qwen's 151665
PROMPT = "def parse(self):"


def make_checkpoints(folder, **config):
    """Write a target, and a draft of nearly its weights; return their folders."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    sizes = {"layers": 2, "context": 96, "kv_heads": 2, "vocab_size": VOCAB_SIZE + 8}
    target = make_model(make_config("llama", **sizes, tied=False))
    draft = add_noise(target, 0.02)
    draft.config.update({"pard_token": MASK, "spd_type": "pard"} | config)
    return save(draft, tokenizer, folder / "draft"), save(target, tokenizer, folder / "target")


class Pair:
    def __init__(self, folder, precision):
        self.progress = Progress()
        self.draft, target = make_checkpoints(folder)
        options = {"precision": precision, "num_draft_tokens": K, "progress": self.progress}
        self.bundle = export(self.draft, target, folder / "bundle", **options)
        self.pipeline = specedge.load(self.bundle.folder)


@pytest.fixture(scope="module", params=["fp32", "int8"])
def pair(request, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp(request.param), request.param)


def test_the_manifest_has_the_mask_token_of_the_config(pair):
    draft = pair.bundle.draft
    assert (draft.mask_token, pair.bundle.target.mask_token) == (MASK, None)
    assert draft.vocab_size == VOCAB_SIZE
    assert not any(graph.name in ("unrolled", "sampled") for graph in draft.graphs)
    assert (
        f"draft: drafts all tokens of a round in one pass, by token {MASK}" in pair.progress.notes
    )


@pytest.mark.parametrize("k", range(1, K + 1))
def test_greedy_text_equals_plain_decoding(pair, k):
    check_greedy(pair.pipeline, PROMPT, 40, k)


@pytest.mark.parametrize("k", [1, 4, K])
def test_a_round_takes_one_draft_pass(pair, k):
    stats = pair.pipeline.generate(PROMPT, 40, num_draft_tokens=k, ignore_eos=True).stats
    assert (
        stats.num_rounds - 1 <= stats.num_draft_passes <= stats.num_rounds
    )  # the last has one token
    assert stats.num_drafted > stats.num_rounds or k == 1
    assert stats.num_accepted


OPTIONS = {
    "filters": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    "seed-stable": {"temperature": 1.0, "coupling": "gumbel"},
    "chain": {"temperature": 0.7, "drafter": "chain"},
    "grammar": {"temperature": 0.7, "regex": "(ab|cd|[0-9]){40} end"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_shorter_request_is_a_prefix(pair, name):
    def run(count):
        options = {"num_draft_tokens": 4, "seed": 3, "ignore_eos": name != "grammar"}
        options |= OPTIONS[name]
        return pair.pipeline.generate(PROMPT, count, **options).tokens

    longest = run(24)
    assert all(run(count) == longest[:count] for count in (1, 2, 3, 5, 8, 13))


def test_the_planner_may_use_it(pair):
    generation = pair.pipeline.generate(PROMPT, 40, ignore_eos=True)
    plain = pair.pipeline.generate(PROMPT, 40, num_draft_tokens=0, ignore_eos=True)
    assert generation.tokens == plain.tokens


def logits_after(model, tokens):
    return model.forward(tokens).array().copy()


def check_rollback(model):
    """Assert that after drafts the cache gives the logits of a fresh one."""
    text = [7, 1, 300, 44, 12, 9, 9, 250]
    drafter = ParallelDraftModel(model, mask_token=MASK, vocab_size=VOCAB_SIZE)
    drafter.truncate(0)
    for length, next_length in ((3, 4), (4, 7), (7, 8)):
        drafter.propose(History(text[:length]), 4, Sampling(1.0), np.full(4, 0.3))
        drafter.truncate(next_length - 1)
    model.truncate(6)
    found = logits_after(model, text[6:])
    model.truncate(0)
    model.prefill(text[:6])
    np.testing.assert_allclose(found, logits_after(model, text[6:]), atol=1e-4)


def test_mask_rows_are_rolled_back(pair):
    check_rollback(pair.pipeline.draft)


def test_mask_rows_left_in_the_cache_are_noticed(pair):
    """The row of a mask token then stands for a token of the text."""

    class KeepingMask:
        def __init__(self, model):
            self.model = model

        def __getattr__(self, name):
            return getattr(self.model, name)

        def truncate(self, length):
            masks = self.model.cache._tokens[length : length + 2] == [MASK, MASK]
            self.model.truncate(length + masks)

    with pytest.raises(AssertionError):
        check_rollback(KeepingMask(pair.pipeline.draft))


@pytest.mark.parametrize("pair", ["fp32"], indirect=True)
def test_acceptance_is_that_of_drafts_in_one_pass(pair):
    target, draft = (
        FloatModel(role, model, pair.bundle.folder / role)
        for role, model in pair.bundle.models.items()
    )
    texts = [np.array([3, 1, 400, 1, 5, 9, 2, 6, 5]), np.array([2, 7, 1, 8, 2, 8])]
    logits = compute_logits(target.runner(target.folder, target.ops[-1]), texts)
    model = AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32).eval()
    k = 3
    for text, expected, result in zip(
        texts, logits, draft_in_parallel(draft, texts, logits, k), strict=True
    ):
        for start in range(len(text) - k + 1):
            tokens = torch.tensor([[*text[: start + 1], *[MASK] * (k - 1)]])
            with torch.no_grad():
                rows = model(tokens).logits[0, -k:].numpy()
            of_rows = acceptance_by_row(rows, expected[start : start + k], None)
            np.testing.assert_allclose(result[:, start], of_rows, atol=1e-4)
        assert np.isnan(result[:, len(text) - k + 1 :]).all()


def test_the_export_reports_acceptance_by_position(pair):
    (note,) = [
        note for note in pair.progress.notes if note.startswith("draft: acceptance by position")
    ]
    greedy, sampled = note.split(" greedy, ")
    assert len(re.findall(r"[0-9]+%", greedy)) == len(re.findall(r"[0-9]+%", sampled)) == K
    assert 0 < pair.bundle.draft.acceptance.sampled < 1


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE + 8, "128020", True])
def test_a_mask_token_outside_the_embedding_is_refused(tmp_path, token):
    draft, target = make_checkpoints(tmp_path)
    path = draft / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": token}))
    with pytest.raises(CheckpointError, match=r"pard_token .*one of the 520 tokens"):
        export(draft, target, tmp_path / "bundle")


def test_host_graphs_are_refused_by_name(pair, tmp_path):
    with pytest.raises(
        ExportError, match=r"draft drafts all tokens of a round in one pass \(PARD\)"
    ):
        add_graphs(pair.bundle.folder, tmp_path / "copy")


def test_requests_that_share_passes_have_their_own_texts(pair):
    prompts = [PROMPT, "import json\n", "x = "]
    options = {"num_draft_tokens": 4, "temperature": 0.8, "ignore_eos": True}
    numbers = range(len(prompts))
    with specedge.load(pair.bundle.folder, slots=3) as pipeline:
        shared = pipeline.generate_batch(prompts, 24, seed=5, **options)
    alone = [
        pair.pipeline.generate(prompts[i], 24, seed=item_seed(5, i), **options) for i in numbers
    ]
    assert [g.tokens for g in shared] == [g.tokens for g in alone]


def test_warm_up_runs_the_passes_of_drafts(pair, monkeypatch):
    model, passes = pair.pipeline.draft.with_new_cache(), []
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda tokens, rows: passes.append((len(tokens), rows)) or forward(tokens, rows),
    )
    model.warm_up(range(K, 2 * K + 1))
    assert passes == [(K + num_unread - 1, K) for num_unread in range(1, K + 2)]
    assert not model.length
