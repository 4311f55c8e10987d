"""Bundles with graphs for hosts, made once a session."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner


def _embedded(folder, *options):
    pytest.importorskip("onnx_ir", reason="needs the export extra")
    pytest.importorskip("onnxruntime_extensions", reason="needs the hosts extra")
    from specedge.cli.embed import embed

    done = CliRunner().invoke(embed, ["--output", str(folder), *options])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="session")
def fused_bundle(tmp_path_factory):
    """The embedded pair with a graph of a whole round."""
    return _embedded(tmp_path_factory.mktemp("fused") / "bundle")


@pytest.fixture(scope="session")
def split_bundle(tmp_path_factory):
    """The embedded pair with graphs of a draft step and of the accept rule."""
    return _embedded(tmp_path_factory.mktemp("split") / "bundle", "--layout", "split")


@pytest.fixture(scope="session")
def small_rounds(tmp_path_factory):
    """The embedded pair with graphs of rounds of one draft token and of two."""
    return _embedded(tmp_path_factory.mktemp("small") / "bundle", "-k", "1", "-k", "2")


def _encoder_decoder(folder, layout):
    pytest.importorskip("onnx_ir", reason="needs the export extra")
    from encoder_decoder_bundles import make_encoder_decoder
    from specedge.bundle import MANIFEST
    from specedge.exporter import embed
    from specedge.sampling_options import DecodingDefaults
    from specedge.verification.transcripts import transcripts

    made = make_encoder_decoder(folder)
    defaults = DecodingDefaults(2, suppress_tokens=(0, 17, 23), begin_suppress_tokens=(9, 12, 30))
    text = replace(made, decoding_defaults=defaults).to_json()
    (folder / MANIFEST).write_text(text, "utf-8")
    embed(folder, num_draft_tokens=[2, 4] if layout == "fused" else (), layout=layout,
          golden=transcripts)  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory):
    """An encoder-decoder with rounds in one graph, and banned tokens."""
    return _encoder_decoder(tmp_path_factory.mktemp("sources") / "bundle", "fused")


@pytest.fixture(scope="session")
def split_encoder_decoder(tmp_path_factory):
    """An encoder-decoder with graphs of a draft step and of the accept rule."""
    return _encoder_decoder(tmp_path_factory.mktemp("split_sources") / "bundle", "split")


def _draft_head(folder, fuses):
    pytest.importorskip("onnx_ir", reason="needs the export extra")
    from draft_head_bundles import TOKEN_IDS, make_draft_head
    from specedge.exporter import embed
    from specedge.verification.transcripts import transcripts

    make_draft_head(folder, TOKEN_IDS if fuses else None, fuses)
    embed(folder, golden=transcripts)
    return folder


def _speech(folder, layout):
    pytest.importorskip("onnx_ir", reason="needs the export extra")
    from encoder_decoder_bundles import make_encoder_decoder
    from specedge.exporter import embed

    make_encoder_decoder(folder, is_speech=True, prefix=())
    embed(folder, layout=layout)
    return folder


@pytest.fixture(scope="session")
def eagle_head(tmp_path_factory):
    """A target with a draft head that fuses its hidden states, for some of the tokens."""
    return _draft_head(tmp_path_factory.mktemp("eagle") / "bundle", True)


@pytest.fixture(scope="session")
def mtp_head(tmp_path_factory):
    """A target with a draft head that reads its last hidden states as they are."""
    return _draft_head(tmp_path_factory.mktemp("mtp") / "bundle", False)


@pytest.fixture(scope="session")
def speech(tmp_path_factory):
    """A model of speech with rounds in one graph."""
    return _speech(tmp_path_factory.mktemp("speech") / "bundle", "fused")


@pytest.fixture(scope="session")
def split_speech(tmp_path_factory):
    """A model of speech with graphs of a draft step and of the accept rule."""
    return _speech(tmp_path_factory.mktemp("split_speech") / "bundle", "split")


@pytest.fixture(params=["fused", "split"])
def bundle(request):
    """A bundle of each layout."""
    return request.getfixturevalue(f"{request.param}_bundle")


@pytest.fixture(scope="session")
def pipeline(fused_bundle):
    """specedge itself, on the same pair."""
    import specedge

    return specedge.load(fused_bundle)
