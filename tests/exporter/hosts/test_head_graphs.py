"""Host graphs of draft heads generate the text of the runtime's decoder."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import specedge
from cases import exhaustive
from checkpoints import make_checkpoint, make_tokenizer
from draft_head_bundles import CONTEXT, TOKEN_IDS, VOCAB_SIZE, make_draft_head
from eagle_heads import SAFEAILAB, HeadSpec, write_head
from round_host import Split
from specedge.bundle import MANIFEST, Bundle
from specedge.errors import BundleError, ExportError
from specedge.exporter import embed, export
from specedge.runtime.backend.sessions import Device
from specedge.verification.transcripts import transcripts

SAMPLINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
]
PROMPTS = ([5, 8, 13, 21, 34], [7], [*range(5, 39)] * 2)


@pytest.fixture(scope="module", params=[True, False], ids=["fuse", "no fuse"])
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    # Without token 0, in whose column the weights are at temperature 0.
    make_draft_head(folder, TOKEN_IDS[1:] if request.param else None, request.param)
    return embed(folder, golden=transcripts)


@pytest.fixture(scope="module")
def pipeline(bundle):
    with specedge.load(bundle.folder) as pipeline:
        yield pipeline


def host(bundle, k=4, ends=()):
    files = {graph.name: bundle.path(graph.file) for graph in bundle.hosts.graphs}
    decoder = bundle.path(bundle.target.graph("decoder", bundle.hosts.ops).file)
    paths = [files["draft"], decoder, files["accept"]]
    paths += [files["fuse"]] if "fuse" in files else []
    return Split([*map(Device().open, paths)], bundle, k, ends)


def check(bundle, pipeline, k, prompt, count, sampling, piece=None):
    options = {"num_draft_tokens": k, "drafter": "model", "seed": 3, "ignore_eos": True}
    expected = pipeline.generate(prompt, count, **options, **sampling)
    tokens, accepted = host(bundle, k).generate(prompt, count, seed=3, piece=piece, **sampling)
    assert tokens == expected.tokens
    left = count - np.cumsum([0, *(len(round_.tokens) for round_ in expected.rounds)])
    counts = [round_.num_accepted for round_ in expected.rounds]
    assert accepted == np.minimum(counts, left[:-1]).tolist()
    return sum(accepted)


def test_heads_have_graphs_of_the_split_layout(bundle):
    names = [graph.name for graph in bundle.hosts.graphs if graph.name not in ("encode", "decode")]
    assert names == ["draft", "accept", *(["fuse"] if bundle.draft.has_graph("fuse") else [])]
    ports = {graph.name: graph.signature for graph in bundle.hosts.graphs}
    assert "hidden" in {port.role for port in ports["draft"].inputs}
    assert "next_hidden" in {port.role for port in ports["draft"].outputs}
    assert Bundle.read(bundle.folder) == bundle


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_split_rounds_generate_the_text_of_the_decoder(bundle, pipeline, k, sampling):
    num_accepted = [check(bundle, pipeline, k, prompt, 40, sampling) for prompt in PROMPTS]
    assert sum(num_accepted)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
def test_a_prompt_in_pieces_gives_the_same_text(bundle, pipeline, sampling):
    for piece in (1, 7, 33):
        check(bundle, pipeline, 4, PROMPTS[2], 30, sampling, piece)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
def test_passes_of_wide_heads_are_cut_with_their_hidden_states(bundle, pipeline, sampling):
    hosts = dataclasses.replace(bundle.hosts, pass_boundaries=(4, 9, 10, 20, 63, 80))
    cut = dataclasses.replace(bundle, hosts=hosts).at(bundle.folder)
    for prompt in PROMPTS:
        check(cut, pipeline, 4, prompt, 30, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=str)
def test_text_ends_at_the_context_limit(bundle, pipeline, sampling):
    prompt = np.random.default_rng(0).integers(5, VOCAB_SIZE, CONTEXT - 9).tolist()
    options = {"num_draft_tokens": 4, "drafter": "model", "seed": 3, "ignore_eos": True}
    expected = pipeline.generate(prompt, 40, **options, **sampling)
    assert host(bundle).generate(prompt, 40, seed=3, **sampling)[0] == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", exhaustive("fp32")])
def test_exported_heads_generate_the_text_of_the_decoder(precision, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    target = make_checkpoint(tmp_path / "target", "llama", tokenizer, layers=6, hidden=32)
    head = write_head(tmp_path / "head", HeadSpec(SAFEAILAB, vocab_size=512, columns=100))
    options = {"num_draft_tokens": 3, "max_length": 96, "precision": precision, "ops": "all"}
    exported = embed(export(head, target, tmp_path / "bundle", **options).folder)
    with specedge.load(exported.folder) as pipeline:
        for prompt in PROMPTS:
            for sampling in SAMPLINGS:
                check(exported, pipeline, 3, prompt, 20, sampling)


def test_golden_transcripts_are_replayed(bundle):
    golden = json.loads(bundle.path(bundle.hosts.golden).read_text("utf-8"))
    replaying = host(bundle, ends=bundle.end_tokens)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    for one in golden["transcripts"]:
        options = {name: one[name] for name in names}
        tokens, length = one["prompt_tokens"], one["max_new_tokens"]
        assert replaying.generate(tokens, length, **options) == (one["tokens"], one["num_accepted"])
    assert sum(sum(one["num_accepted"]) for one in golden["transcripts"])


def test_the_fused_layout_is_refused(bundle):
    with pytest.raises(ExportError, match="some/draft reads the target's hidden states"):
        embed(bundle.folder, layout="fused")
    assert Bundle.read(bundle.folder).hosts is not None


def test_a_manifest_with_another_number_of_fuse_graphs_is_rejected(bundle, tmp_path):
    manifest = json.loads(bundle.to_json())
    graphs = manifest["hosts"]["graphs"]
    if bundle.draft.has_graph("fuse"):
        graphs[:] = [graph for graph in graphs if graph["name"] != "fuse"]
    else:
        graphs.append(graphs[0] | {"name": "fuse"})
    (tmp_path / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(BundleError, match="'fuse' if and only if"):
        Bundle.read(tmp_path)
