"""Packages that provide ONNX Runtime."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributions import install, only
from specedge.diagnosis import packages, plug_in
from specedge.diagnosis.doctor import Machine, ProbeResult

PROJECT = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "version", "is_old"),
    [
        ("onnxruntime", "1.22.1", True),
        ("onnxruntime", "1.23.0", False),
        ("onnxruntime-gpu", "1.22.0", True),
        ("onnxruntime-gpu", "1.23.2", False),
        ("onnxruntime-gpu", "1.100.0", False),
        ("onnxruntime-directml", "1.22.0", True),
    ],
)
def test_old_versions_get_the_command_that_upgrades(tmp_path, monkeypatch, name, version, is_old):
    install(tmp_path, name, version)
    only(monkeypatch, tmp_path)
    (package,) = packages.runtimes()
    assert (package.name, package.version, package.is_old) == (name, version, is_old)
    machine = Machine()
    machine.runtime = ProbeResult({"version": version, "folder": "site"})
    fixes = [problem.fix for problem in machine.problems]
    assert fixes == [f'pip install --upgrade "{name}>={package.floor}"'] * is_old


def test_versions_are_those_of_the_project():
    extras = PROJECT["project"]["optional-dependencies"]
    assert f"onnxruntime>={packages.FLOORS['onnxruntime']}" in extras["cpu"]
    assert f"onnxruntime-gpu[cuda]>={packages.FLOORS['onnxruntime-gpu']}" in extras["gpu"]
    assert packages.LIBRARIES["tensorrt"]["libnvinfer.so.10"] in extras["tensorrt"]


def test_companion_packages_are_not_detected_as_onnxruntime(tmp_path, monkeypatch):
    install(tmp_path, "onnxruntime-extensions", "0.15", "onnxruntime_extensions")
    install(tmp_path, "onnxruntime-genai", "0.18", "onnxruntime_genai")
    install(tmp_path, plug_in.RTX.packages[0], "0.5.0", plug_in.RTX.module)
    install(tmp_path, "ort-nightly-gpu", "1.33.0.dev20261101")
    (tmp_path / "broken.dist-info").mkdir()
    only(monkeypatch, tmp_path)
    assert list(map(str, packages.runtimes())) == ["ort-nightly-gpu 1.33.0.dev20261101"]
    assert packages.related()[plug_in.RTX.packages[0]] == "0.5.0"


@pytest.mark.parametrize(
    ("version", "runtime", "matches"),
    [
        ("0.2.0", "1.30.0", True),
        ("0.4.1", "1.32.0", True),
        ("0.4.0", "1.31.1", False),
        ("0.4.0", "1.33.0", False),
        ("0.9.0", "1.32.0", False),  # not known
    ],
)
def test_cuda_plug_in_runs_with_the_matched_onnxruntime_only(
    tmp_path, monkeypatch, version, runtime, matches
):
    name = plug_in.CUDA.packages[1]
    install(tmp_path, name, version, plug_in.CUDA.module)
    monkeypatch.syspath_prepend(tmp_path)
    mismatch = plug_in.CUDA.mismatch(SimpleNamespace(__version__=runtime))
    assert (mismatch is None) is matches
    if mismatch:
        assert mismatch[0].startswith(
            f"the plug-in {name} {version} does not match ONNX Runtime {runtime}"
        )
