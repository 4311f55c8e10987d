"""Exports of a target with an EAGLE-3 head."""

import json

import numpy as np
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import eagle_heads
import ggufs
from checkpoints import make_checkpoint, make_tokenizer
from eagle_heads import NVIDIA, SAFEAILAB, SPECULATORS, HeadSpec
from eagle_reference import EagleReference
from specedge.bundle import Bundle
from specedge.cli import cli
from specedge.errors import CheckpointError, ExportError, PairError, ParityError
from specedge.exporter import Progress, export
from specedge.exporter import model_export as exporting
from specedge.exporter.checkpoint.draft_heads import DraftHeadModule
from specedge.exporter.checkpoint.eagle import EagleDraft
from specedge.exporter.hosts import host_graphs
from specedge.exporter.tracing import uncached_graphs
from specedge.exporter.verification.subgraph import open_session

SPEC = HeadSpec(SAFEAILAB, vocab_size=512, columns=100)
LAYERS = (2, 3, 3)  # the default of 6 layers
LENGTH = 9


class Heads:
    """A target, and heads that are written when first asked for."""

    def __init__(self, folder):
        self.folder = folder
        tokenizer = make_tokenizer(folder / "tokenizer")
        self.target = make_checkpoint(
            folder / "target", "llama", tokenizer, layers=6, hidden=32, kv_heads=2
        )

    def head(self, spec):
        return eagle_heads.write_head(self.folder / f"head-{hash(spec)}", spec)

    def export(self, spec, folder, **options):
        progress = Progress()
        options = {"num_draft_tokens": 3, "max_length": 32, "ops": "onnx", **options}
        bundle = export(self.head(spec), self.target, folder, progress=progress, **options)
        return bundle, progress.notes


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return Heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def exported(heads, tmp_path_factory):
    return heads.export(SPEC, tmp_path_factory.mktemp("exported") / "bundle", ops="all")


def embedding_of(target):
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


class DraftGraphs:
    """Passes of an exported head, with a cache."""

    def __init__(self, bundle, ops):
        self.model, self.ops, self.length = bundle.draft, ops, 0
        self.sessions = {
            name: open_session(
                bundle.path(bundle.draft.graph(name, ops).file), ort.SessionOptions()
            )
            for name in ("fuse", "decoder", "step")
        }
        self.caches = {
            f"past_key_values.{state.name}": np.zeros(state.sizes(bundle.draft.capacity), "f4")
            for state in bundle.draft.states
        }

    def fuse(self, states):
        (fused,) = self.sessions["fuse"].run(["fused"], {"hidden": states.astype("f4")})
        return fused

    def run(self, name, tokens, hidden):
        session = self.sessions[name]
        feeds = {"input_ids": tokens, "past_length": np.array([self.length]), "hidden": hidden}
        feeds |= self.caches | ({"logits_from": np.array([0])} if name == "decoder" else {})
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(names, feeds), strict=True))
        self.caches = {k: results[k.replace("past_key_values", "present")] for k in self.caches}
        self.length += tokens.shape[1]
        return results["logits"], results["next_hidden"]


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_graphs_draft_a_chain_as_the_reference(exported, heads, ops):
    bundle, _ = exported
    reference = EagleReference(SPEC, eagle_heads.head_tensors(SPEC), embedding_of(heads.target))
    graphs, ids = DraftGraphs(bundle, ops), list(bundle.ids_of(bundle.draft))
    tokens, states = eagle_heads.example(SPEC, LENGTH)
    fused = graphs.fuse(states.numpy())
    rows = LENGTH - 3
    logits, hidden = graphs.run("decoder", tokens.numpy()[:, :rows], fused[:, :rows])
    expected, expected_hidden = reference.run(tokens[0, :rows], reference.fuse(states[0, :rows]))
    for i in range(rows, LENGTH + 1):
        by_token = reference.target_tokens(expected)[:, ids].numpy()
        assert np.allclose(logits[0], by_token, atol=1e-4)
        assert np.allclose(hidden[0], expected_hidden.numpy(), atol=1e-4)
        if i < LENGTH:  # further rows read what the preceding one returned
            logits, hidden = graphs.run("step", tokens.numpy()[:, i : i + 1], hidden[:, -1:])
            expected, expected_hidden = reference.run(tokens[0, i : i + 1], expected_hidden[-1:])


def test_manifest_describes_hidden_states(exported):
    bundle, notes = exported
    target, draft = bundle.target, bundle.draft
    assert (target.hidden.layers, target.hidden.size, target.hidden.draft_size) == (
        LAYERS,
        96,
        None,
    )
    assert (draft.hidden.layers, draft.hidden.size, draft.hidden.draft_size) == (LAYERS, 96, 32)
    assert draft.architecture == "eagle3"
    assert draft.context_length == target.context_length == 32
    assert (draft.padded_vocab_size, draft.vocab_size) == (100, 512)
    tokens = torch.arange(100) + eagle_heads.head_tensors(SPEC)["d2t"]
    assert bundle.ids_of(draft) == tuple(sorted(tokens.tolist()))
    assert any("EAGLE-3 head of 1 layer, with 100 tokens" in note for note in notes)
    names = {graph.name for graph in draft.graphs}
    assert {"decoder", "step", "catchup", "verify", "prefill", "fuse"} <= names
    assert {"unrolled", "sampled"} <= names
    assert "batched" not in names


def test_graphs_have_the_ports_of_their_signatures(exported):
    bundle, _ = exported
    for model in bundle.models.values():
        for graph in model.graphs:
            session = open_session(bundle.path(graph.file), ort.SessionOptions())
            signature = model.signatures[graph.signature]
            ports = (*signature.inputs, *signature.outputs)
            values = (*session.get_inputs(), *session.get_outputs())
            assert {port.name for port in ports} == {value.name for value in values}
            sizes = {value.name: (value.type, value.shape[-1]) for value in values}
            for port in ports:
                if port.role == "hidden":
                    assert sizes[port.name] == ("tensor(float)", port.shape[-1])


def test_inspect_shows_hidden_states(exported):
    bundle, _ = exported
    result = CliRunner().invoke(cli, ["inspect", "--bundle", str(bundle.folder)])
    assert "inputs of layers 2, 3, 3, 96 channels" in result.output
    assert "96 channels, read as 32" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        HeadSpec(NVIDIA, vocab_size=512, columns=100, norm_before_fc=True, layer_ids=(1, 3, 5)),
        HeadSpec(
            SPECULATORS, "qwen3", num_layers=3, vocab_size=512, columns=512, has_embedding=True,
            hidden=48, fc_norm=True, norm_output=True, norm_before_residual=True,
        ),
    ],
    ids=["nvidia", "qwen3"],
)  # fmt: skip
def test_variants_are_exported_and_verified(heads, tmp_path, spec):
    bundle, _ = heads.export(spec, tmp_path / "bundle")
    assert Bundle.read(tmp_path / "bundle").draft.hidden == bundle.draft.hidden
    assert bundle.draft.parity["onnx"].structure_error < 1e-12
    assert (bundle.draft.token_ids is None) == (spec.columns == 512)


@pytest.mark.slow
def test_a_head_reads_the_dequantized_embedding_of_a_gguf_target(heads, tmp_path):
    path = tmp_path / "target.gguf"
    numbers = ggufs.write(path, ggufs.Kind.Q8_0, tmp_path, "llama", layers=6, hidden=32)
    options = {"num_draft_tokens": 3, "max_length": 32, "ops": "onnx", "draft_precision": "fp32"}
    bundle = export(heads.head(SPEC), path, tmp_path / "bundle", **options)
    assert (bundle.target.weights_dtype, bundle.draft.weights_dtype) == ("keep", "float32")
    embedding = torch.from_numpy(numbers["model.embed_tokens.weight"])
    reference = EagleReference(SPEC, eagle_heads.head_tensors(SPEC), embedding)
    graphs, ids = DraftGraphs(bundle, "onnx"), list(bundle.ids_of(bundle.draft))
    tokens, states = eagle_heads.example(SPEC, LENGTH)
    logits, hidden = graphs.run("decoder", tokens.numpy(), graphs.fuse(states.numpy()))
    expected, expected_hidden = reference.run(tokens[0], reference.fuse(states[0]))
    by_token = reference.target_tokens(expected)[:, ids].numpy()
    np.testing.assert_allclose(logits[0], by_token, atol=1e-4)
    np.testing.assert_allclose(hidden[0], expected_hidden.numpy(), atol=1e-4)


@pytest.mark.slow
def test_16_bit_variants_keep_hidden_states_in_float32(heads, tmp_path):
    bundle, _ = heads.export(SPEC, tmp_path / "bundle", compute="fp16")
    graphs = [graph for graph in bundle.draft.graphs if graph.ops == "onnx-fp16"]
    assert {"decoder", "step", "fuse"} <= {graph.name for graph in graphs}
    for graph in graphs:
        session = open_session(bundle.path(graph.file), ort.SessionOptions())
        values = (*session.get_inputs(), *session.get_outputs())
        types = {value.name: value.type for value in values if "hidden" in value.name}
        assert {*types.values()} == {"tensor(float)"}


def _other_states(monkeypatch):
    """Return the final norm's output instead of the last layer's."""
    measure = exporting.geometry.measure_geometry

    def wrong(model, *args, **options):
        if isinstance(model, EagleDraft):
            model.returned_layer += 1
        return measure(model, *args, **options)

    monkeypatch.setattr(exporting.geometry, "measure_geometry", wrong)
    compute = exporting.reference.compute_references

    def right(role, model, sources, geometry, **options):
        if geometry.reads_hidden:
            geometry = exporting.replace(geometry, returns_normalized=False)
        return compute(role, model, sources, geometry=geometry, **options)

    monkeypatch.setattr(exporting.reference, "compute_references", right)


def _unnormalized_fuse(monkeypatch):
    """Omit the norm before `fc` from the graph."""
    trace = uncached_graphs.trace_uncached

    def wrong(model, *args):
        if not isinstance(model, DraftHeadModule):
            return trace(model, *args)
        norm, model.input_norm = model.input_norm, None
        try:
            return trace(model, *args)
        finally:
            model.input_norm = norm

    monkeypatch.setattr(uncached_graphs, "trace_uncached", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "message"),
    [(_other_states, "hidden state"), (_unnormalized_fuse, "fused")],
)
def test_verification_finds_planted_faults(heads, tmp_path, monkeypatch, plant, message):
    plant(monkeypatch)
    spec = HeadSpec(NVIDIA, vocab_size=512, columns=100, norm_before_fc=True)
    with pytest.raises(ParityError, match=message):
        heads.export(spec, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"draft_vocab": 50}, "--draft-vocab does not apply"), ({"draft_adapter": "x"}, "adapter")],
)
def test_options_of_other_drafts_are_refused(heads, tmp_path, options, message):
    with pytest.raises((ExportError, CheckpointError), match=message):
        heads.export(SPEC, tmp_path / "bundle", **options)


def test_host_graphs_are_those_of_the_split_layout(exported, tmp_path):
    bundle, _ = exported
    hosts = host_graphs.embed(bundle.folder, tmp_path / "hosts").hosts
    assert {graph.name for graph in hosts.graphs} >= {"draft", "accept", "fuse"}
    with pytest.raises(ExportError, match="fused rounds do not return; use --layout split"):
        host_graphs.embed(bundle.folder, tmp_path / "fused", layout="fused")


def test_mtp_layers_of_the_target_are_refused_by_name(heads, tmp_path):
    with pytest.raises(CheckpointError, match="MTP layers of the model type 'llama'"):
        export("mtp", heads.target, tmp_path / "bundle")


def test_head_as_target_is_refused(heads, tmp_path):
    with pytest.raises(CheckpointError, match="EAGLE-3 head, which drafts for a target"):
        export(None, heads.head(SPEC), tmp_path / "bundle")


def test_head_of_another_target_is_refused(heads, tmp_path):
    spec = HeadSpec(target_hidden=64, vocab_size=512, has_embedding=True)
    with pytest.raises(PairError, match=r"a hidden size of 64, target .* has 32"):
        heads.export(spec, tmp_path / "bundle")


def test_other_drafters_are_refused_by_name(heads, tmp_path):
    folder = heads.head(HeadSpec(vocab_size=512, columns=50))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["speculators_model_type"] = "dflash"
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(CheckpointError, match="a drafter of the kind 'dflash'"):
        export(folder, heads.target, tmp_path / "bundle")
