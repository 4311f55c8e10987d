"""Graphs in another basis compute the same function."""

import functools

import numpy as np
import onnx_ir as ir
import pytest
import torch

from architectures import ARCHITECTURES
from cases import slow
from checkpoints import make_model
from comparing import model_of, traced
from specedge.errors import ParityError
from specedge.exporter.graph.external_data import WeightsFile
from specedge.exporter.quantization import rotation, rotation_rewriter
from specedge.exporter.quantization.matrices import embeddings, matrix_groups
from specedge.exporter.quantization.rotation import Rotation
from specedge.exporter.verification.exact_graph import ExactGraph

ROTATED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "smollm3", "granite")
NOT_ROTATED = {
    "gpt2": "Gather writes to the residual stream",
    "gemma2": "a norm writes to the residual stream",
    "gemma3_text": "a norm writes to the residual stream",
    "olmo2": "MatMul reads the residual stream",
    "mixtral": "is also read by other nodes",
}


@pytest.mark.parametrize("size", [1, 7, 64, 96, 640])
def test_a_rotation_is_orthogonal_and_mixes_every_channel(size):
    matrix = Rotation(size).apply(torch.eye(size).double())
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(Rotation(size).undo(matrix), torch.eye(size).double())
    assert float(matrix.abs().max()) <= 1.5 / size**0.5


def test_a_hadamard_matrix_is_its_own_inverse():
    x = torch.randn(3, 128, dtype=torch.float64)
    torch.testing.assert_close(rotation.apply_hadamard(rotation.apply_hadamard(x, 32), 32), x)


def with_gains(model):
    """The model with vectors of all sizes, which a new one has at 1 and 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.rand(parameter.shape)
                parameter.copy_(0.1 * noise if name.endswith("bias") else 0.5 + noise)
    return model


class Changed:
    """A model's decoders in another basis."""

    def __init__(self, model, folder, ops="onnx", hidden_layers=()):
        folder.mkdir()
        self.before = traced(with_gains(model), folder, ops, lazy={}, hidden_layers=hidden_layers)
        self.folder = folder.with_name("changed")
        self.folder.mkdir()
        path = folder / self.before.files["decoder"].source.file_name(ops)
        self.original = path
        self.transforms = rotation_rewriter.choose_transforms([ir.load(path).graph], set())
        model = ir.load(path)
        with WeightsFile(self.folder, "float32") as file:
            rotation_rewriter.transform_graph(model, self.transforms, set(), file)
            ir.save(model, self.folder / path.name)
            file.finish()
        self.path = self.folder / path.name
        self.graph = ir.load(self.path).graph

    def outputs(self, path):
        shapes = dict(
            zip(
                self.before.geometry.cache_names(), self.before.geometry.cache_shapes(), strict=True
            )
        )
        inputs = {"input_ids": np.arange(12)[None], "past_length": [0], "logits_from": [0]}

        def given(name):
            return np.zeros(shapes[name]) if name in shapes else np.array(inputs[name], np.int64)

        return dict(ExactGraph(path).run(given))

    def difference(self):
        """Return the largest relative difference from the outputs in the original basis."""
        before, after = (self.outputs(path) for path in (self.original, self.path))
        assert before.keys() == after.keys()
        return max(
            float(np.abs(after[name] - value).max() / np.abs(value).max())
            for name, value in before.items()
        )


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a function that rotates each model once."""

    @functools.cache
    def changed(kind, ops="onnx"):
        shared = kind in ("llama", "gpt2")  # forms that other tests trace, too
        model = model_of(kind) if shared else make_eager(ARCHITECTURES[kind][1]())
        return Changed(model, tmp_path_factory.mktemp("basis") / "before", ops)

    return changed


def make_eager(config):
    model = make_model(config)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        *(
            pytest.param(x, marks=pytest.mark.slow(exhaustive=x not in ("gemma2", "mixtral")))
            for x in (*ROTATED, *NOT_ROTATED)
            if x != "llama"
        ),
    ],
)
def test_rotated_graph_is_equivalent(changed, kind):
    found = changed(kind)
    assert (found.transforms.rotation is not None) is (kind in ROTATED)
    assert NOT_ROTATED.get(kind, "") in found.transforms.reason
    assert found.difference() < 2e-5


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_rotated_graph_has_unit_norm_gains_and_untied_head(changed, ops):
    graph = changed("llama", ops=ops).graph
    norms = [node for node in graph if node.op_type == rotation_rewriter.RMS_NORM]
    assert all((node.inputs[1].const_value.numpy() == 1).all() for node in norms)
    places = [stored.offset for _, stored in embeddings(graph)]
    assert places[0] not in {m.offset for group in matrix_groups(graph) for m in group.matrices}


def test_hadamard_is_applied_after_nonlinearities(changed):
    graph = changed("llama").graph
    blocks = [node for node in graph if node.outputs[0].name.endswith(".hadamard")]
    assert len(blocks) == 2  # layers


@pytest.mark.parametrize(("kind", "num_mixed"), [("gpt2", 0), slow("gemma3_text", 2)])
def test_a_tied_head_that_cannot_be_rotated_stays_tied(changed, kind, num_mixed):
    """After an RMS norm, head and embedding share a table in the Hadamard basis."""
    graph = changed(kind).graph
    (lookup, table), *_ = embeddings(graph)
    (head,) = [group for group in matrix_groups(graph) if table.offset in group.key]
    mixed = [head.value, *(user.outputs[0] for user, _ in lookup.outputs[0].uses())]
    assert sum("hadamard" in value.name for value in mixed) == num_mixed


EVERY_STATE = (0, 1, 2, 3)  # of two layers


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("llama", EVERY_STATE),
        slow("llama", (3,)),
        slow("granite", EVERY_STATE),
        slow("qwen3", (2,)),
    ],
)
def test_hidden_states_of_a_rotated_graph_are_in_the_original_basis(kind, layers, tmp_path):
    model = model_of(kind) if kind == "llama" else make_eager(ARCHITECTURES[kind][1]())
    found = Changed(model, tmp_path / "before", "gqa", layers)
    assert found.transforms.rotation is not None
    assert found.outputs(found.path)["hidden"].shape[-1] == model.config.hidden_size * len(layers)
    assert found.difference() < 2e-5


@pytest.mark.parametrize("kind", [slow("gemma3_text"), slow("gpt2")])
def test_hidden_states_of_a_graph_that_is_not_rotated_are_unchanged(kind, tmp_path):
    model = make_eager(ARCHITECTURES[kind][1]())
    assert Changed(model, tmp_path / "before", "onnx", EVERY_STATE).difference() < 2e-5


def test_hidden_states_in_the_rotated_basis_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rotation_rewriter, "_restore_hidden_states", lambda *arguments: None)
    assert Changed(model_of("llama"), tmp_path / "before", hidden_layers=(1,)).difference() > 0.1


def test_rotation_spreads_outlier_channels(changed):
    """The largest weight of a column is nearer to its mean than before."""
    torch.manual_seed(0)
    rows = torch.randn(4, 576)
    rows[:, 5] *= 50
    before, after = (x.abs().amax(1) / x.square().mean(1).sqrt() for x in (
        rows.double(), Rotation(576).apply(rows.double())))  # fmt: skip
    assert (after < 0.4 * before).all()


def test_a_wrong_rotation_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Rotation, "undo", lambda self, x, axis=-1: self.apply(x, axis))
    with pytest.raises(ParityError, match="inverse rotation, it differs"):
        Changed(model_of("llama"), tmp_path / "before")
