"""Bundles with a reduced draft vocabulary generate the text of the target."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import document_reader
import specedge
from auditing import passed_checks
from cases import exhaustive, slow
from checkpoints import add_noise, make_config, make_model, make_tokenizer, save
from specedge.bundle.batched_signature import BATCHED
from specedge.errors import ExportError
from specedge.exporter import Progress, export
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities

CONTEXT, COUNT = 96, 200
PROMPT = list(range(40, 52))
KINDS = {
    "llama": {"ops": "onnx"},
    "gpt2 in half precision": {},
    "self": {"draft": "self:1"},
    "int8": {"precision": "int8"},
    "self in int8": {"draft": "self:1", "precision": "int8"},
}
EVERY_KIND = pytest.mark.parametrize(
    "made",
    [
        "llama",
        exhaustive("gpt2 in half precision"),
        exhaustive("self"),
        exhaustive("int8"),
        slow("self in int8"),
    ],
    indirect=True,
)


class Made:
    def __init__(self, folder, kind):
        tokenizer = make_tokenizer(folder / "tokenizer")
        family = kind.split()[0] if kind.startswith("gpt2") else "llama"
        sizes = (
            {"layers": 2, "context": CONTEXT, "hidden": 64, "kv_heads": 2}
            if family == "llama"
            else {"layers": 1, "context": CONTEXT, "hidden": 576, "heads": 9, "scale": 0.1}
        )
        target = make_model(make_config(family, **sizes, tied=kind == "self"))
        draft = add_noise(target, 0.03)
        dtype = torch.bfloat16 if family == "gpt2" else torch.float32
        self.draft = save(draft.to(dtype), tokenizer, folder / "draft")
        self.target = save(target.to(dtype), tokenizer, folder / "target")
        self.progress = Progress()
        options = {"draft": self.draft, "ops": "all"} | KINDS[kind]
        self.bundle = export(
            options.pop("draft"), self.target, folder / "bundle",
            draft_vocab=COUNT, progress=self.progress, **options,
        )  # fmt: skip
        self.pipeline = specedge.load(self.bundle.folder)
        self.ids = self.bundle.ids_of(self.bundle.draft)


@pytest.fixture(scope="module")
def made(request, tmp_path_factory):
    return Made(tmp_path_factory.mktemp("cut"), request.param)


@EVERY_KIND
def test_manifest_lists_draft_token_ids(made):
    bundle = made.bundle
    file = bundle.draft.token_ids
    own = file == "draft/ids.bin"
    assert own or file == "target/draft-ids.bin"
    assert own is not bundle.shares_weights
    assert np.fromfile(bundle.path(file), "<i4").tolist() == list(made.ids)
    assert len(made.ids) == bundle.draft.padded_vocab_size == COUNT
    assert (bundle.draft.vocab_size, bundle.target.padded_vocab_size) == (512, 512)
    assert 0 in made.ids
    assert [note for note in made.progress.notes if "200 of 512 tokens" in note]
    assert not [note for note in made.progress.notes if "the draft supports" in note]


@EVERY_KIND
def test_draft_logits_equal_full_logits_of_its_tokens(made):
    whole = AutoModelForCausalLM.from_pretrained(
        made.target if made.bundle.shares_weights else made.draft, dtype=torch.float32
    )
    if made.bundle.shares_weights:
        del whole.model.layers[1:]
        whole.config.num_hidden_layers = 1
    made.pipeline.draft.truncate(0)
    scores = made.pipeline.draft.forward(PROMPT)
    assert scores.ids.tolist() == list(made.ids)
    with torch.no_grad():
        wanted = whole(torch.tensor([PROMPT])).logits[0].numpy()[:, made.ids]
    allowed = 0.1 if made.bundle.draft.quantization else 1e-5
    assert np.abs(scores.array() - wanted).max() < allowed * np.abs(wanted).max()


@EVERY_KIND
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_text_equals_plain_decoding(made, k):
    plain = made.pipeline.generate(PROMPT, CONTEXT, num_draft_tokens=0, logprobs=1, ignore_eos=True)
    found = made.pipeline.generate(PROMPT, CONTEXT, num_draft_tokens=k, logprobs=1, ignore_eos=True)
    assert found.tokens == plain.tokens
    assert found.logprobs == plain.logprobs
    drafted = found.stats.num_drafted
    assert drafted >= len(found.rounds) - 1


@EVERY_KIND
def test_drafted_token_follows_targets_distribution(made):
    """Counts of the six likeliest tokens, of those the draft lacks, and of all others."""
    pipeline, sampling = made.pipeline, specedge.Sampling(2.0)
    pipeline.target.truncate(0)
    row = pipeline.target.forward(PROMPT)[-1].array()
    chances = probabilities(row, sampling, History(PROMPT)).row(512).astype(float)
    likely = [int(token) for token in np.argsort(-chances)[:6]]
    lacking = np.array([t not in made.ids and t not in likely for t in range(512)])
    runs = [
        pipeline.generate(PROMPT, 1, 2.0, seed=seed, num_draft_tokens=2, ignore_eos=True)
        for seed in range(200)
    ]
    tokens = np.array([one.tokens[0] for one in runs])
    cells = [chances[likely], [chances[lacking].sum()]]
    expected = np.concatenate([*cells, [1 - sum(map(np.sum, cells))]])
    counts = [int((tokens == token).sum()) for token in likely]
    counts.append(int(lacking[tokens].sum()))
    counts.append(len(runs) - sum(counts))
    spread = np.sqrt(len(runs) * expected * (1 - expected))
    assert (np.abs(np.array(counts) - len(runs) * expected) < 4 * spread + 1).all()
    assert 0 < sum(one.stats.num_accepted for one in runs) < len(runs)


@EVERY_KIND
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 50, "top_p": 0.9}], ids=str)
def test_host_written_from_document_generates_the_same_text(made, options):
    folder = made.bundle.folder
    manifest = document_reader.read(folder)
    assert manifest == json.loads(made.bundle.to_json())
    sessions = document_reader.session_options()
    models = [
        document_reader.Model(folder, manifest["models"][role], "onnx", sessions, 1e4)
        for role in ("target", "draft")
    ]
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    found, rounds = document_reader.generate(*models, PROMPT, 30, 4, 1, plain | options)
    one = specedge.load(folder, ops="onnx").generate(
        PROMPT, 30, num_draft_tokens=4, seed=1, ignore_eos=True, **options
    )
    assert (found, rounds) == (one.tokens, one.stats.num_rounds)


@EVERY_KIND
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {5: 4.0, 300: 6.0, 511: 5.0}, "bad_words": ["import", "self"]},
        {"min_new_tokens": 20},
    ],
    ids=["penalties", "biases and bans", "held back ends"],
)
def test_options_with_tokens_outside_draft_vocabulary_keep_the_text(made, options):
    texts = [
        made.pipeline.generate(PROMPT, 40, num_draft_tokens=k, **options).tokens for k in (0, 3)
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow(exhaustive=True)
@EVERY_KIND
def test_audit_passes(made):
    is_batched = made.bundle.target.has_graph(BATCHED)  # of `gqa` graphs only
    assert len(passed_checks(made.bundle)) == 8 + is_batched


@pytest.mark.parametrize("made", ["llama"], indirect=True)
@pytest.mark.parametrize(
    ("count", "said"), [(512, "the draft has 512 tokens; use a smaller"), (1, "are always kept")]
)
def test_invalid_vocabulary_size_is_rejected_before_tracing(made, tmp_path, count, said):
    progress = Progress()
    with pytest.raises(ExportError, match=said):
        export(made.draft, made.target, tmp_path / "b", draft_vocab=count, progress=progress)
    assert not (tmp_path / "b").exists()
    assert not [step for step in progress.seconds if "Loading" in step]


@pytest.mark.parametrize("count", [0, -3, 1.5])
def test_non_integer_vocabulary_size_is_rejected(tmp_path, count):
    with pytest.raises(ValueError, match="draft_vocab"):
        export("a", "b", tmp_path / "c", draft_vocab=count)
