"""Logits of selected rows are bitwise equal to the same rows of full logits."""

import shutil

import numpy as np
import onnx_ir as ir
import pytest

from cases import exhaustive, slow
from comparing import computed, measure, model_of, traced
from specedge.bundle.gpu_signatures import ONE_CALL
from specedge.errors import ExportError, ParityError
from specedge.exporter import export
from specedge.exporter.graph import graphs
from specedge.exporter.graph.nodes import add_constant, insert_node
from specedge.exporter.tracing.geometry import Geometry
from specedge.exporter.verification.runner import FillNoise, PassAction, ReadRows, Runner

LENGTH = 9


@pytest.fixture(
    scope="module",
    params=["float32", exhaustive("int8")],
)
def bundle(request, pairs, tmp_path_factory):
    if request.param == "float32":
        return pairs.bundle("gpt2")
    folder = tmp_path_factory.mktemp("int8") / "bundle"
    return export(*pairs.checkpoint("gpt2"), folder, precision="int8", max_length=96)


def runner_of(bundle, ops):
    model = bundle.target
    sizes = model.context_length, model.capacity, model.padded_vocab_size
    lengths = graphs.graph_files(bundle.num_draft_tokens, model.context_length)
    return Runner(bundle.folder / "target", lengths, Geometry(*sizes, model.layers), ops)


def outputs(runner, first):
    tokens = np.arange(LENGTH)
    actions = [
        FillNoise(0, 2 * LENGTH),
        PassAction("decoder", tokens, 0, first),
        ReadRows(0, LENGTH),
    ]
    return runner.run(actions)[1:]


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_logits_from_a_row_equal_full_logits(bundle, ops):
    runner = runner_of(bundle, ops)
    logits, caches = outputs(runner, 0)
    assert len(logits) == LENGTH
    for first in range(1, LENGTH + 1):
        found, rows = outputs(runner, first)
        assert np.array_equal(found, logits[first:])
        assert all(map(np.array_equal, rows, caches))


def is_logits_from(value):
    return value is not None and value.name == "logits_from"


def test_fixed_length_graphs_have_no_row_selection(exported):
    for model in exported.models.values():
        for entry in model.graphs:
            graph = ir.load(exported.path(entry.file)).graph
            readers = {node.op_type for node in graph if any(map(is_logits_from, node.inputs))}
            names = [value.name for value in (*graph.inputs, *graph.initializers.values())]
            if entry.name in ONE_CALL:
                continue
            chosen = entry.name in ("decoder", "scored")
            assert readers == ({"Slice"} if chosen else set())
            assert any("logits_from" in name for name in names) is chosen


def layers_behind(graph):
    """The operators that are computed for the rows alone that logits are wanted of."""
    nodes = list(graph)
    at = max(i for i, node in enumerate(nodes) if any(map(is_logits_from, node.inputs)))
    return [node.op_type for node in nodes[at + 1 :]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Model, its graphs by graph variant, and its references."""
    model = model_of("llama")
    runners = {ops: traced(model, tmp_path_factory.mktemp(ops), ops) for ops in ("onnx", "gqa")}
    return model, runners, computed(model, runners["onnx"])


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("kind", ["llama", slow("gpt2")])
def test_prefill_skips_last_layer_matrices_after_attention(kind, ops, llama, tmp_path):
    runner = llama[1][ops] if kind == "llama" else traced(model_of(kind), tmp_path, ops)
    behind = layers_behind(ir.load(runner.path("decoder")).graph)
    assert behind.count("MatMul") == {"llama": 3, "gpt2": 2}[kind] + 1


def wrong_axis(graph, node):
    node.replace_input_with(3, add_constant(graph, np.array([2], np.int64), "fault"))


def off_by_one(graph, node):
    one = add_constant(graph, np.array([1], np.int64), "fault.one")
    node.replace_input_with(
        1, insert_node(node, "Add", [node.inputs[1], one], "fault", node.inputs[1])
    )


def all_rows(graph, node):
    zero = add_constant(graph, np.array([0], np.int64), "fault.zero")
    node.replace_input_with(
        1, insert_node(node, "Mul", [node.inputs[1], zero], "fault", node.inputs[1])
    )


def first_rows(graph, node):
    """Return the requested number of rows, but the first instead of the last ones."""
    start, huge = node.inputs[1], node.inputs[2]
    less = insert_node(node, "Neg", [start], "fault.less", start)
    one = add_constant(graph, np.array([1], np.int64), "fault.one")
    asked = insert_node(node, "Min", [start, one], "fault.asked", start)
    rest = insert_node(node, "Sub", [one, asked], "fault.rest", start)
    far = insert_node(node, "Mul", [rest, huge], "fault.far", start)
    zero = add_constant(graph, np.array([0], np.int64), "fault.zero")
    node.replace_input_with(1, zero)
    node.replace_input_with(2, insert_node(node, "Add", [less, far], "fault", start))


@pytest.mark.parametrize("ops", ["onnx", exhaustive("gqa")])
@pytest.mark.parametrize("fault", [wrong_axis, off_by_one, all_rows, first_rows])
def test_logits_of_wrong_rows_are_refused(fault, ops, llama, tmp_path):
    model, runners, references = llama
    folder = shutil.copytree(runners[ops].folder, tmp_path / "model")
    runner = Runner(folder, list(runners[ops].files.values()), runners[ops].geometry, ops)
    changed = ir.load(runner.path("decoder"))
    (node,) = (n for n in changed.graph if n.outputs[0].name == "logits_from.rows")
    fault(changed.graph, node)
    ir.save(changed, runner.path("decoder"))
    runner = Runner(folder, list(runner.files.values()), runner.geometry, ops)
    with pytest.raises((ParityError, ExportError), match=r"logits|cannot run decoder"):
        measure(model, runner, references=references)
