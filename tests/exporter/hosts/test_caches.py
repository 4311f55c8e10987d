"""Caches of a fused round are written in place, and hold the rows of its text."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from cases import exhaustive, slow
from round_host import Fused
from specedge import int8_products
from specedge.exporter import embed
from specedge.exporter.hosts.round_graphs import RoundBuilder
from specedge.runtime.backend.ort import inference_session
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device

PROMPT = list(range(60, 72))


@pytest.fixture(
    scope="module",
    params=["embedded", exhaustive("gpt2")],
)
def bundle(request, pairs, tmp_path_factory):
    """A pair in float32, and one in integers, each with a round in one graph."""
    folder = tmp_path_factory.mktemp("caches") / "bundle"
    return embed(shutil.copytree(pairs.bundle(request.param).folder, folder), layout="fused")


@pytest.fixture
def host(bundle):
    device = exact_device(bundle.models.values(), Device())
    return Fused(device.open(bundle.path("round.onnx")), bundle)


def elsewhere(host):
    """Allocate separate output buffers; the last output of a cache is its next input."""
    graph = host.graphs[0]
    others = {name: np.zeros(x.shape(), np.float32) for name, x in graph.buffers.items()}
    names = [value.name for value in graph.session.get_outputs()]

    def run(given):
        inputs = {name: given[name] for name in graph.shapes.keys() - others.keys()}
        found = dict(zip(names, graph.session.run(names, inputs | others), strict=True))
        others.update({read: found[written] for written, read in graph.writes.items()})
        return {name: found[name] for name in graph.results}

    graph.run = run
    return others


def test_in_place_caches_equal_separate_caches(host):
    tokens, _ = host.generate(PROMPT, 30, 1.0, seed=3)
    in_place = {name: x.numpy().copy() for name, x in host.graphs[0].buffers.items()}
    wanted = elsewhere(host)
    assert host.generate(PROMPT, 30, 1.0, seed=3)[0] == tokens
    length = len(PROMPT) + len(tokens) - 1 - host.num_draft_tokens
    for name, buffer in in_place.items():
        assert np.abs(buffer[:, :, :length]).min(axis=(0, 1, 3)).max() > 0
        np.testing.assert_array_equal(buffer[:, :, :length], wanted[name][:, :, :length])


def test_all_outputs_of_cache_are_at_address_of_its_input(host):
    host.generate(PROMPT, 8)
    graph = host.graphs[0]
    names = [value.name for value in graph.session.get_outputs()]
    found = dict(zip(names, graph.binding.get_outputs(), strict=True))
    for written, read in graph.writes.items():
        assert found[written].data_ptr() == graph.buffers[read].data_ptr()
    assert {*graph.writes.values()} == graph.buffers.keys()


@pytest.mark.parametrize("ops", ["gqa", slow("onnx")])
def test_run_allocates_no_cache_sized_block(bundle, tmp_path, ops, capfd):
    path = bundle.folder / f"round-{ops}.onnx"
    both = {"draft": ops, "target": ops}
    ir.save(RoundBuilder(bundle, bundle.num_draft_tokens, both).fused_model(), path)
    options = ort.SessionOptions()
    options.log_severity_level = 2
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    options.add_session_config_entry(int8_products.UNSIGNED_OPTION, "1")
    session = inference_session(path, options, ["CPUExecutionProvider"])
    Fused(session, bundle).generate(PROMPT, 8)
    outputs = ir.load(path).graph.outputs
    caches = [value for value in outputs if "present." in value.name]
    with open(session.end_profiling(), encoding="utf-8") as file:
        events = [event for event in json.load(file) if event["name"].endswith("_kernel_time")]
    sizes = {np.prod(value.shape.numpy()) for value in caches}
    makers = {
        event["name"].removesuffix("_kernel_time")
        for event in events
        for made in event["args"]["output_type_shape"]
        if any(np.prod(shape) in sizes for shape in made.values())
    }
    assert makers == {value.producer().name for value in caches}
    assert "copying past_cache" not in capfd.readouterr().err
