"""Host graphs of encoder-decoders generate the text of the runtime's decoder."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

import specedge
from cases import exhaustive
from encoder_decoder_bundles import PAD, make_encoder_decoder
from round_host import Fused, Split
from specedge.bundle import MANIFEST, Bundle
from specedge.exporter import embed
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device
from specedge.runtime.sampling.source import Source
from specedge.sampling_options import DecodingDefaults
from specedge.verification.transcripts import transcripts

SOURCES = ([9, 8, 7, 6, 1], [5], [11, 30, 12, 5] * 7 + [1])
SAMPLINGS = ({}, {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2, "seed": 3})
DEFAULTS = {
    "suppress_tokens": (PAD, 17, 23),
    "begin_suppress_tokens": (9, 17, 30),
    "no_repeat_ngram_size": 2,
}
LENGTH = 40
ODD_TOKENS = tuple(range(1, 40, 2))


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


def texts_of(bundle):
    with specedge.load(bundle.folder) as pipeline:
        sampled = {"temperature": 1.0, "seed": 1}
        return [
            pipeline.generate(source, LENGTH, num_draft_tokens=0, **sampling).tokens
            for source in SOURCES
            for sampling in ({}, sampled)
        ]


@pytest.mark.parametrize("layout", ["fused", "split"])
@pytest.mark.parametrize("names", [*((name,) for name in DEFAULTS), (*DEFAULTS,)], ids=str)
def test_tokens_banned_by_the_generation_config_are_not_generated(tmp_path, layout, names):
    bundle = make_encoder_decoder(tmp_path / "bundle")
    before = texts_of(bundle)
    defaults = DecodingDefaults(**{name: DEFAULTS[name] for name in names})
    bundle = rewrite(bundle, decoding_defaults=defaults)
    assert texts_of(bundle) != before
    bundle = embed(bundle.folder, layout=layout)
    check(bundle, samplings=(*SAMPLINGS, {"temperature": 1.0, "top_p": 0.9, "seed": 1}))


@pytest.mark.parametrize("layout", ["fused", "split"])
@pytest.mark.parametrize(
    "vocabulary",
    [
        {"vocab_size": 25},
        {"token_ids": (PAD, *ODD_TOKENS)},
        {"token_ids": ODD_TOKENS},
    ],
    ids=["smaller", "reduced", "reduced, without token 0"],
)
def test_draft_with_fewer_tokens_does_not_propose_banned_ones(tmp_path, layout, vocabulary):
    bundle = make_encoder_decoder(tmp_path / "bundle", **vocabulary)
    before = texts_of(bundle)
    bundle = rewrite(bundle, decoding_defaults=DecodingDefaults(**DEFAULTS))
    assert texts_of(bundle) != before
    (accepted,) = check(embed(bundle.folder, layout=layout)).values()
    assert 0 in accepted
    assert max(accepted) > 1


def test_plain_round_does_not_generate_banned_tokens(tmp_path):
    bundle = make_encoder_decoder(tmp_path / "bundle", None)
    bundle = embed(rewrite(bundle, decoding_defaults=DecodingDefaults(**DEFAULTS)).folder)
    first, host = [*bundle.decoder_start, *bundle.decoder_prefix], hosted(bundle, 1)
    with specedge.load(bundle.folder) as pipeline:
        for source in SOURCES:
            expected = pipeline.generate(source, LENGTH, num_draft_tokens=0)
            assert host.generate(first, LENGTH, source=source)[0] == expected.tokens


@pytest.mark.parametrize("layout", ["fused", "split"])
def test_draft_reads_the_beginning_that_its_encoder_can_read(tmp_path, layout):
    bundle = make_encoder_decoder(tmp_path / "bundle")
    draft = replace(bundle.draft, encoder=replace(bundle.draft.encoder, max_length=3))
    bundle = rewrite(bundle, models={**bundle.models, "draft": draft})
    check(embed(bundle.folder, layout=layout))


def test_golden_transcripts_replay_exactly(pair):
    rewrite(pair, decoding_defaults=DecodingDefaults(**DEFAULTS))
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


@pytest.mark.parametrize(
    ("draft", "layout"),
    [("own", "fused"), ("own", "split"), ("shared", "fused"), ("shared", "split"), (None, "fused")],
)
def test_rounds_of_speech_generate_the_text_of_the_decoder(tmp_path, draft, layout):
    bundle = make_encoder_decoder(tmp_path / "bundle", draft, is_speech=True)
    bundle = embed(bundle.folder, layout=layout, golden=transcripts)
    assert bundle.hosts.golden is None
    host = hosted(bundle, 1 if draft is None else 4)
    first = [*bundle.decoder_start, *bundle.decoder_prefix]
    random, texts = np.random.default_rng(0), []
    with specedge.load(bundle.folder) as pipeline:
        features = exact_device(bundle.models.values(), Device()).open(
            bundle.path(bundle.target.graph("features", "onnx").file)
        )
        for length in (10_240, 5_000):
            audio = random.uniform(-1, 1, length).astype(np.float32)
            padded = np.pad(audio, (0, 10_240 - length))[None]
            source = Source(features.run(None, {"audio": padded})[0][0])
            options = {"num_draft_tokens": 4} if draft else {"num_draft_tokens": 0}
            expected = pipeline.generate(source, LENGTH, **options)
            texts.append(host.generate(first, LENGTH, source=audio)[0])
            assert texts[-1] == expected.tokens
    assert texts[0] != texts[1]


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
    target = make_checkpoint(request.param, folder / "target")
    draft = make_checkpoint(request.param, folder / "draft", noise=0.05)
    return export(draft, target, folder / "bundle", precision="int8")


@pytest.mark.parametrize("layout", ["fused", "split"])
def test_exported_families_generate_the_text_of_the_decoder(exported, layout):
    check(embed(exported.folder, layout=layout))
