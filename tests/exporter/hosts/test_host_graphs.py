"""`specedge embed`: graphs of a round in a bundle's folder, and in its manifest."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
from click.testing import CliRunner

import specedge
from cases import slow
from round_host import Fused, Split
from specedge.bundle import FORMAT, MANIFEST, Bundle, store
from specedge.cli.embed import embed as command
from specedge.errors import ExportError
from specedge.exporter import embed, export
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device
from specedge.verification.transcripts import LEAST_MARGIN

PROMPT = [60, 61, 62, 63]


@pytest.fixture
def folder(pairs, tmp_path):
    """A bundle of the gpt2 pair that may be changed."""
    return shutil.copytree(pairs.bundle("gpt2").folder, tmp_path / "bundle")


@pytest.fixture(scope="module")
def both_layouts(pairs, tmp_path_factory):
    """The gpt2 pair with each layout of graphs."""
    folder = tmp_path_factory.mktemp("layouts")
    source = pairs.bundle("gpt2").folder
    return {
        layout: embed(shutil.copytree(source, folder / layout), layout=layout)
        for layout in ("fused", "split")
    }


def run(*arguments):
    return CliRunner().invoke(command, list(map(str, arguments)))


def rounds(bundle):
    """The graphs that every host has, without those of text."""
    return [graph for graph in bundle.hosts.graphs if graph.name not in ("encode", "decode")]


def sessions(bundle):
    device = exact_device(bundle.models.values(), Device())
    return {graph.name: device.open(bundle.path(graph.file)) for graph in rounds(bundle)}


def hosted(bundle):
    """A host of the bundle's graphs, at K = 4."""
    opened = sessions(bundle)
    if "round" in opened:
        return Fused(opened["round"], bundle, bundle.end_tokens)
    decoder = bundle.path(bundle.target.graph("decoder", bundle.hosts.ops).file)
    target = exact_device([bundle.target], Device()).open(decoder)
    return Split((opened["draft"], target, opened["accept"]), bundle, 4, bundle.end_tokens)


@pytest.fixture(scope="module", params=["fused", slow("split")])
def embedded(request, tmp_path_factory):
    """The embedded pair with graphs that the command line added, and the output."""
    output = tmp_path_factory.mktemp("hosted") / "bundle"
    done = run("--output", output, "--layout", request.param)
    assert done.exit_code == 0, done.output
    return Bundle.read(output), done.stdout


def test_embedded_pair_is_copied_and_its_graphs_generate_the_same_text(embedded, pipeline):
    bundle, printed = embedded
    is_fused = len(rounds(bundle)) == 1
    files = ["round.onnx"] if is_fused else ["draft.onnx", "accept.onnx"]
    files += ["encode.onnx", "decode.onnx", "golden.json"]
    assert printed.split() == [str(bundle.path(name)) for name in files]
    assert bundle.hosts.files == files
    assert bundle.hosts.ids_only is None
    wanted = pipeline.generate(PROMPT, 24, 1.0, seed=2, num_draft_tokens=4, drafter="model")
    assert hosted(bundle).generate(PROMPT, 24, 1.0, seed=2)[0] == wanted.tokens


def test_golden_transcripts_replay_exactly_without_near_ties(embedded, pipeline):
    bundle, _ = embedded
    host = hosted(bundle)
    golden = json.loads(bundle.path(bundle.hosts.golden).read_text("utf-8"))
    assert golden["onnxruntime"] == bundle.hosts.onnxruntime
    assert {one["temperature"] > 0 for one in golden["transcripts"]} == {True, False}
    for one in golden["transcripts"]:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        options = {name: one[name] for name in names}
        tokens, length = one["prompt_tokens"], one["max_new_tokens"]
        assert host.generate(tokens, length, **options) == (one["tokens"], one["num_accepted"])
        assert len(one["margins"]) == len(one["num_accepted"])
        assert min(one["margins"]) > LEAST_MARGIN
        assert pipeline.prompts.tokens(one["prompt"]) == tokens
        options |= {"num_draft_tokens": one["num_draft_tokens"], "drafter": "model"}
        written = pipeline.generate(tokens, length, **options)
        assert (written.tokens, written.text) == (one["tokens"], one["text"])


def test_manifest_lists_inputs_and_outputs_of_each_graph(both_layouts):
    bundle = both_layouts["fused"]
    assert bundle.format == FORMAT
    (graph,) = rounds(bundle)
    (session,) = sessions(bundle).values()
    for tensors, values in (
        (graph.signature.inputs, session.get_inputs()),
        (graph.signature.outputs, session.get_outputs()),
    ):
        assert [t.name for t in tensors] == [v.name for v in values]
        assert [list(t.shape) for t in tensors] == [v.shape for v in values]
    buffers = {t.state for t in graph.signature.inputs} - {None}
    assert buffers == {t.state for t in graph.signature.outputs} - {None}
    assert graph.file in bundle.files


def test_tensor_names_except_caches_are_roles(both_layouts):
    for bundle in both_layouts.values():
        for graph in bundle.hosts.graphs:
            tensors = (*graph.signature.inputs, *graph.signature.outputs)
            assert all((t.role == "state") == (t.state is not None) for t in tensors)
            assert all(t.name == t.role for t in tensors if t.state is None)


def test_session_options_are_right_for_weights_on_every_processor(both_layouts, embedded):
    for bundle in both_layouts.values():
        assert "session.x64quantprecision" not in bundle.hosts.session_options
    integers, _ = embedded
    assert integers.hosts.session_options["session.x64quantprecision"] == "1"


def test_new_layout_replaces_the_previous_one(folder):
    embed(folder, num_draft_tokens=[2, 4])
    bundle = embed(folder, layout="split")
    assert [graph.name for graph in rounds(bundle)] == ["draft", "accept"]
    assert not list(folder.glob("round*"))
    assert Bundle.read(folder) == bundle
    assert specedge.load(folder).generate(PROMPT, 4).tokens


def test_embedded_pair_is_not_modified_in_place(tmp_path):
    before = (store.embedded_folder() / MANIFEST).read_bytes()
    done = run()
    assert done.exit_code
    assert "specify --output FOLDER" in str(done.exception)
    assert (store.embedded_folder() / MANIFEST).read_bytes() == before


def test_more_draft_tokens_than_caches_have_room_for_are_refused(folder):
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(ExportError, match="export the pair with --num-draft-tokens 9"):
        embed(folder, num_draft_tokens=[9])
    assert sorted(p.name for p in folder.iterdir()) == before


@pytest.mark.slow(exhaustive=True)
def test_self_draft_has_host_graphs(pairs, tmp_path):
    output = tmp_path / "self"
    export("self:1", pairs.checkpoint("gpt2")[1], output, draft_precision="fp32")
    for layout in ("fused", "split"):
        bundle = embed(output, layout=layout)
        wanted = specedge.load(output).generate(
            PROMPT, 24, 1.0, seed=2, num_draft_tokens=4, drafter="model"
        )
        assert hosted(bundle).generate(PROMPT, 24, 1.0, seed=2)[0] == wanted.tokens


def test_hosts_with_missing_file_or_incomplete_round_are_rejected(both_layouts):
    manifest = json.loads(both_layouts["split"].to_json())
    for change, message in (
        (lambda hosts: hosts["graphs"].pop(0), "either round or both draft and accept"),
        (lambda hosts: hosts["graphs"].append(hosts["graphs"][0]), "not repeat a graph"),
        (lambda hosts: hosts.update(golden="other.json"), "'other.json', which is not among"),
        (lambda hosts: hosts.update(ids_only="nothing"), "ids_only must be null if"),
        (lambda hosts: hosts["graphs"][0].update(file="target/decoder.onnx"), "plain file name"),
    ):
        changed = copy.deepcopy(manifest)
        change(changed["hosts"])
        with pytest.raises(ValueError, match=message):
            Bundle.from_json(json.dumps(changed))
