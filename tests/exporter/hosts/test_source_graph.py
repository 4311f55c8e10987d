"""Host graphs of encoder-decoders generate the text of the runtime's decoder."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace

import pytest

import specedge
from cases import exhaustive
from encoder_decoder_bundles import PAD, make_encoder_decoder
from round_host import Fused, Split
from specedge.bundle import MANIFEST, Bundle
from specedge.errors import ExportError
from specedge.exporter import embed
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device
from specedge.sampling_options import DecodingDefaults
from specedge.verification.transcripts import transcripts

SOURCES = ([9, 8, 7, 6, 1], [5], [11, 30, 12, 5] * 7 + [1])
SAMPLINGS = ({}, {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "seed": 3})
SUPPRESSED = (PAD, 17, 23)
LENGTH = 40


def rewrite(bundle, **fields):
    """Replace keys of a bundle's manifest."""
    new = replace(bundle, **fields)
    (bundle.folder / MANIFEST).write_text(new.to_json(), "utf-8")
    return Bundle.read(bundle.folder)


def hosted(bundle, k=4):
    device = exact_device(bundle.models.values(), Device())
    files = {(g.name, g.num_draft_tokens): bundle.path(g.file) for g in bundle.hosts.graphs}
    opener = device.open(files["open", None])
    if ("round", k) in files:
        return Fused(device.open(files["round", k]), bundle, bundle.end_tokens, opener)
    decoder = bundle.path(bundle.target.graph("decoder", bundle.hosts.ops).file)
    paths = files["draft", None], decoder, files["accept", None]
    return Split([device.open(path) for path in paths], bundle, k, bundle.end_tokens, opener)


def accepted_within(rounds, length):
    """The numbers of accepted tokens that are within the text of a request."""
    starts = [0, *itertools.accumulate(len(round_.tokens) for round_ in rounds)]
    return [min(r.num_accepted, length - at) for r, at in zip(rounds, starts, strict=False)]


def check(bundle, ks=(4,), sources=SOURCES, samplings=SAMPLINGS):
    """Compare with the runtime; return the numbers of accepted tokens by K."""
    first, counts = [*bundle.decoder_start, *bundle.decoder_prefix], {}
    with specedge.load(bundle.folder) as pipeline:
        for k in ks:
            host, accepted = hosted(bundle, k), []
            for sampling in samplings:
                for source in sources:
                    expected = pipeline.generate(
                        source, LENGTH, num_draft_tokens=k, drafter="model", **sampling
                    )
                    tokens, numbers = host.generate(first, LENGTH, source=source, **sampling)
                    assert tokens == expected.tokens
                    assert numbers == accepted_within(expected.rounds, LENGTH)
                    accepted += numbers
            counts[k] = accepted
    return counts


@pytest.fixture(params=["own", "shared"])
def pair(request, tmp_path):
    """A draft model with an encoder of its own, and one that shares the target's."""
    return make_encoder_decoder(tmp_path / "bundle", request.param)


def test_fused_rounds_of_each_k_generate_the_text_of_the_decoder(pair):
    bundle = embed(pair.folder, num_draft_tokens=[1, 2, 4])
    for accepted in check(bundle, ks=(1, 2, 4)).values():
        assert 0 in accepted  # a rejection
        assert max(accepted) > 0


def test_split_rounds_generate_the_text_of_the_decoder(pair):
    check(embed(pair.folder, layout="split"), ks=(1, 3))


def test_plain_round_generates_the_text_of_the_target(tmp_path):
    bundle = embed(make_encoder_decoder(tmp_path / "bundle", None).folder)
    first, host = [*bundle.decoder_start, *bundle.decoder_prefix], hosted(bundle, 1)
    with specedge.load(bundle.folder) as pipeline:
        for source in SOURCES:
            expected = pipeline.generate(source, LENGTH, num_draft_tokens=0)
            assert host.generate(first, LENGTH, source=source)[0] == expected.tokens


@pytest.mark.parametrize("layout", ["fused", "split"])
def test_suppressed_tokens_are_not_generated(tmp_path, layout):
    bundle = make_encoder_decoder(tmp_path / "bundle")
    with specedge.load(bundle.folder) as pipeline:
        texts = [pipeline.generate(source, LENGTH).tokens for source in SOURCES]
        sampled = [pipeline.generate(s, LENGTH, temperature=1, seed=1).tokens for s in SOURCES]
    assert any({*SUPPRESSED} & {*text} for text in texts + sampled)
    bundle = rewrite(bundle, decoding_defaults=DecodingDefaults(suppress_tokens=SUPPRESSED))
    bundle = embed(bundle.folder, layout=layout)
    check(bundle, samplings=(*SAMPLINGS, {"temperature": 1.0, "top_p": 0.9, "seed": 1}))


@pytest.mark.parametrize("layout", ["fused", "split"])
def test_draft_reads_the_beginning_that_its_encoder_can_read(tmp_path, layout):
    bundle = make_encoder_decoder(tmp_path / "bundle")
    draft = replace(bundle.draft, encoder=replace(bundle.draft.encoder, max_length=3))
    bundle = rewrite(bundle, models={**bundle.models, "draft": draft})
    check(embed(bundle.folder, layout=layout))


def test_golden_transcripts_replay_exactly(pair):
    bundle = embed(pair.folder, num_draft_tokens=[2, 4], golden=transcripts)
    golden = json.loads(bundle.path(bundle.hosts.golden).read_text("utf-8"))
    first = [*bundle.decoder_start, *bundle.decoder_prefix]
    hosts = {k: hosted(bundle, k) for k in (2, 4)}
    with specedge.load(bundle.folder) as pipeline:
        for one in golden["transcripts"]:
            names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
            settings = {name: one[name] for name in names}
            host, length = hosts[one["num_draft_tokens"]], one["max_new_tokens"]
            result = host.generate(first, length, source=one["prompt_tokens"], **settings)
            assert result == (one["tokens"], one["num_accepted"])
            assert pipeline.prompts.tokens(one["prompt"]) == one["prompt_tokens"]


def test_models_that_host_graphs_cannot_decode_are_refused(tmp_path):
    speech = make_encoder_decoder(tmp_path / "speech", is_speech=True)
    with pytest.raises(ExportError, match="it reads speech"):
        embed(speech.folder)
    bundle = make_encoder_decoder(tmp_path / "bundle")
    for name, value in (("no_repeat_ngram_size", 3), ("begin_suppress_tokens", (5,))):
        defaults = DecodingDefaults(**{name: value})
        rewrite(bundle, decoding_defaults=defaults)
        with pytest.raises(ExportError, match=f"do not apply {name}"):
            embed(bundle.folder)


def test_manifest_without_the_graph_of_the_source_is_rejected(pair):
    manifest = json.loads(embed(pair.folder).to_json())
    graphs = manifest["hosts"]["graphs"]
    (opener,) = (graph for graph in graphs if graph["name"] == "open")
    states = {port["state"] for port in opener["signature"]["outputs"]}
    (round_,) = (graph for graph in graphs if graph["name"] == "round")
    read = {port["state"] for port in round_["signature"]["inputs"]} - {None}
    written = {port["state"] for port in round_["signature"]["outputs"]} - {None}
    assert states == read - written
    assert "target.0.cross.key" in states
    changed = copy.deepcopy(manifest)
    changed["hosts"]["graphs"].remove(opener)
    with pytest.raises(ValueError, match="'open' if and only if"):
        Bundle.from_json(json.dumps(changed))


@pytest.fixture(
    scope="module", params=[*map(exhaustive, ("t5", "bart", "marian", "nllb", "t5gemma"))]
)
def exported(request, tmp_path_factory):
    from encoder_decoders import make_encoder_decoder as make_checkpoint
    from specedge.exporter import export

    folder = tmp_path_factory.mktemp(request.param)
    options = {"no_repeat_ngram_size": 0} if request.param == "bart" else {}
    target = make_checkpoint(request.param, folder / "target", **options)
    draft = make_checkpoint(request.param, folder / "draft", noise=0.05, **options)
    return export(draft, target, folder / "bundle", precision="int8")


@pytest.mark.parametrize("layout", ["fused", "split"])
def test_exported_families_generate_the_text_of_the_decoder(exported, layout):
    check(embed(exported.folder, layout=layout))
