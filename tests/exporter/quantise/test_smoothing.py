"""Where a channel's size can go, and that moving it rounds nothing."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from comparing import model_of, traced
from specedge.exporter.compare.stage import open_session
from specedge.exporter.quantise import smoothing
from specedge.exporter.quantise.matrices import groups


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, traced(model_of(request.param), folder)


def routes(graph):
    """What lies on the way to each group, by the kind of its node."""
    return [
        None if (way := smoothing.route(group)) is None else {part.node.op_type for part in way}
        for group in groups(graph)
    ]


def test_sizes_go_through_norms_and_products_and_nothing_that_bends(written):
    kind, runner = written
    graph = ir.load(runner.path("decoder")).graph
    if kind == "llama":  # QKV, o, gate and up, down; the head
        layer = [{"RMSNormalization"}, None, {"RMSNormalization"}, {"MatMul"}]
        assert routes(graph) == 2 * layer + [{"RMSNormalization"}]
    else:  # a GELU lies before the last of a layer
        layer = [{"LayerNormalization"}, None, {"LayerNormalization"}, None]
        assert routes(graph)[:-1] == 2 * layer


def test_a_value_that_something_else_reads_is_left_alone(written):
    _, runner = written
    graph = ir.load(runner.path("decoder")).graph
    first = next(group for group in groups(graph) if smoothing.route(group))
    graph.outputs.append(first.value)
    assert smoothing.route(first) is None


def test_a_graph_whose_sizes_were_moved_gives_the_same_bits(written, tmp_path):
    """Each matrix gets what its input loses, as a Mul behind its columns or before its rows."""
    _, runner = written
    model = ir.load(runner.path("decoder"))
    graph, random = model.graph, np.random.default_rng(0)
    moved = 0
    for group in groups(graph):
        if (way := smoothing.route(group)) is None:
            continue
        by = random.integers(-5, 6, group.matrices[0].stored.numbers().shape[0]).astype(float)
        for node, columns in smoothing.divide(graph, way, by).items():
            _multiply(graph, node, node.outputs[0], columns)
        _multiply(graph, None, group.value, by, {m.node for m in group.matrices})
        moved += 1
    assert moved >= 4
    wanted = _run(runner, runner.path("decoder"))
    ir.save(model, runner.folder / "moved.onnx")
    found = _run(runner, runner.folder / "moved.onnx")
    assert all(map(np.array_equal, found, wanted))


def _multiply(graph, after, value, powers, users=None):
    """Multiply a value by powers of two for some of its readers."""
    name = f"{value.name}.back"
    factors = ir.Value(name=f"{name}.by", const_value=ir.tensor(np.exp2(powers).astype(np.float32)))
    graph.register_initializer(factors)
    node = ir.node("Mul", [value, factors])
    node.outputs[0].name = name
    for user, index in list(value.uses()):
        if user is not node and (users is None or user in users):
            user.replace_input_with(index, node.outputs[0])
    graph.insert_after(after or value.producer(), node)


def _run(runner, path):
    session = open_session(path, ort.SessionOptions())
    shapes = zip(runner.geometry.cache_names(), runner.geometry.cache_shapes(), strict=True)
    values = {name: np.zeros(shape, np.float32) for name, shape in shapes}
    values |= {"input_ids": np.arange(40)[None]}
    values |= {"past_length": np.zeros(1, np.int64), "logits_from": np.zeros(1, np.int64)}
    return session.run(None, values)
