"""Bundles with graphs for hosts, made once a session."""

from __future__ import annotations

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


@pytest.fixture(params=["fused", "split"])
def bundle(request):
    """A bundle of each layout."""
    return request.getfixturevalue(f"{request.param}_bundle")


@pytest.fixture(scope="session")
def pipeline(fused_bundle):
    """specedge itself, on the same pair."""
    import specedge

    return specedge.load(fused_bundle)
