"""Hosts of models with wide heads write specedge's text where kernels change."""

from __future__ import annotations

import numpy as np
import pytest

import specedge
from round_host import Fused, Split
from specedge.attention_kernels import VARIABLE
from specedge.errors import ExportError
from specedge.exporter import embed
from specedge.runtime.backend.sessions import Device
from wide_heads import make_wide_pair

TEXT = [7 * i % 500 for i in range(330)]
SAMPLINGS = ({}, {"temperature": 1.0, "top_k": 20})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return embed(make_wide_pair(tmp_path_factory.mktemp("wide")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return embed(make_wide_pair(tmp_path_factory.mktemp("widest"), 512, has_draft=False))


@pytest.fixture(autouse=True)
def _no_flash_attention(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")


def check(host, pipeline, k, sampling, piece=None):
    for length in (20, 61, 63, 310):
        prompt = TEXT[k : k + length]
        pipeline.forget()
        options = {"num_draft_tokens": k, "drafter": "model", "seed": 3, "ignore_eos": True}
        if pipeline.draft is None:
            del options["drafter"]
        expected = pipeline.generate(prompt, 20, **options, **sampling)
        tokens, _ = host.generate(prompt, 20, seed=3, piece=piece, **sampling)
        assert tokens == expected.tokens
        graph, role = (host.target, "") if isinstance(host, Split) else (host.graphs[0], "target.")
        num_rows = min(length + len(tokens) - 1, pipeline.target.length)
        states = zip(
            pipeline.bundle.target.states, pipeline.target.cache_rows(0, num_rows), strict=True
        )
        for state, rows in states:
            buffer = graph.buffers[f"{role}past_key_values.{state.name}"].numpy()
            assert np.array_equal(buffer[0, :, :num_rows], rows)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_split_rounds_generate_the_text_of_the_decoder(pair, k, sampling):
    assert pair.hosts.pass_boundaries == (63,)
    files = {graph.name: pair.path(graph.file) for graph in pair.hosts.graphs}
    decoder = pair.path(pair.target.graph("decoder", pair.hosts.ops).file)
    sessions = [Device().open(path) for path in (files["draft"], decoder, files["accept"])]
    with specedge.load(pair.folder) as pipeline:
        for piece in (None, 50):
            check(Split(sessions, pair, k), pipeline, k, sampling, piece)


def test_plain_rounds_generate_the_text_of_the_decoder(plain):
    assert plain.hosts.pass_boundaries == (31, 63)
    session = Device().open(plain.path("round.onnx"))
    with specedge.load(plain.folder) as pipeline:
        check(Fused(session, plain), pipeline, 0, {})


def test_the_fused_layout_is_refused(pair):
    with pytest.raises(ExportError, match=r"heads of more than 128 .*; use --layout split"):
        embed(pair.folder, layout="fused")
