"""Smoothing: groups whose scales can be moved, without rounding."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from architectures import ARCHITECTURES
from cases import slow
from checkpoints import make_model
from comparing import model_of, traced
from quantized import with_outliers
from specedge.exporter.quantization import schemes, smoothing
from specedge.exporter.quantization.calibration import InputStatistics
from specedge.exporter.quantization.matrices import matrix_groups
from specedge.exporter.verification.subgraph import open_session

CASES = [  # Q, K and V are one matrix in the last three: beside each other, or head by head
    ("llama", "onnx"), ("llama", "gqa"), ("gpt2", "onnx"),
    *(slow(x) for x in (("phi3", "onnx"), ("gpt_neox", "gqa"))),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def written(request, traced_model, tmp_path_factory):
    kind, ops = request.param
    if kind in ("llama", "gpt2"):
        return kind, traced_model(kind, ops, joins_products=False)[1]
    model = make_model(ARCHITECTURES[kind][1]())
    model.set_attn_implementation("eager")
    return kind, traced(model, tmp_path_factory.mktemp(kind), ops, joins_products=False)


def ways(graph):
    """Node types on the path to each group."""
    return [
        None
        if (way := smoothing.smoothing_path(group)) is None
        else {part.node.op_type for part in way.parts}
        for group in matrix_groups(graph)
    ]


def test_smoothing_paths_pass_only_through_linear_operators(written):
    kind, runner = written
    source = runner.path("decoder").with_name("source-gqa.onnx")  # before its nodes are fused
    graph = ir.load(source if source.exists() else runner.path("decoder")).graph
    if kind == "llama":  # QKV, o, gate and up, down; the head
        layer = [{"RMSNormalization"}, {"MatMul"}, {"RMSNormalization"}, {"MatMul"}]
        assert ways(graph) == 2 * layer + [{"RMSNormalization"}]
    elif kind == "gpt2":  # a GELU lies before the last of a layer
        layer = [{"LayerNormalization"}, {"MatMul", "Add"}, {"LayerNormalization"}, None]
        assert ways(graph) == 2 * layer + [{"LayerNormalization"}]
    else:
        assert [way for way in ways(graph) if way and "MatMul" in way]


def test_value_with_other_consumers_is_not_smoothed(written):
    _, runner = written
    graph = ir.load(runner.path("decoder")).graph
    first = next(group for group in matrix_groups(graph) if smoothing.smoothing_path(group))
    graph.outputs.append(first.value)
    assert smoothing.smoothing_path(first) is None


def test_heads_sharing_a_value_share_smoothing_scales(written):
    """The model has 4 heads of size 16, with grouped or separate value heads."""
    kind, runner = written
    found = map(smoothing.smoothing_path, matrix_groups(ir.load(runner.path("decoder")).graph))
    through_caches = [way for way in found if way is not None and way.cache is not None]
    assert len(through_caches) == 2
    for way in through_caches:
        heads = way.channels.reshape(4, 16)
        assert (heads[:, 1:] == heads[:, :1] + np.arange(1, 16)).all()
        assert len({*heads[:, 0]}) == (2 if kind in ("llama", "phi3") else 4)
        largest = np.exp(np.random.default_rng(0).uniform(0, 9, 64))
        powers = smoothing.smoothing_exponents(largest, np.ones(64), 0.5, way.channels)
        for channel in {*way.channels}:
            (power,) = {*powers[way.channels == channel]}
            assert power == powers[(largest * (way.channels == channel)).argmax()]
        assert len({*powers}) > 4


def test_smoothed_graph_is_bitwise_equal(written):
    """Input scales are moved into each matrix as a Mul of its columns or rows."""
    _, runner = written
    model = ir.load(runner.path("decoder"))
    graph, random = model.graph, np.random.default_rng(0)
    moved, factors = 0, {}
    for group in matrix_groups(graph):
        if (way := smoothing.smoothing_path(group)) is None:
            continue
        by = random.integers(-5, 6, way.size).astype(float)[way.channels]
        for node, columns in smoothing.apply_smoothing(graph, way, by).items():
            _multiply(graph, node, node.outputs[0], columns)
        _multiply(graph, None, group.value, by, {m.node for m in group.matrices})
        if way.cache is not None:
            factors[way.cache.name] = np.exp2(way.spread(by)[way.cache.columns])[:, None]
        moved += 1
    assert moved >= 4
    assert [*factors] == ["past_key_values.0.value", "past_key_values.1.value"]
    wanted = _run(runner, runner.path("decoder"))
    ir.save(model, runner.folder / "moved.onnx")
    logits, *caches = _run(runner, runner.folder / "moved.onnx")
    names = runner.geometry.cache_names()
    caches = [c * factors.get(name, 1) for name, c in zip(names, caches, strict=True)]
    assert all(map(np.array_equal, (logits, *caches), wanted))


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
    """Logits and caches of a pass over twenty tokens behind twenty others."""
    session = open_session(path, ort.SessionOptions())
    names = runner.geometry.cache_names()
    caches = [np.zeros(shape, np.float32) for shape in runner.geometry.cache_shapes()]
    for start in (0, 20):
        values = dict(zip(names, caches, strict=True)) | {"logits_from": np.zeros(1, np.int64)}
        values |= {"input_ids": np.arange(start, start + 20)[None]}
        values |= {"past_length": np.full(1, start, np.int64)}
        logits, *caches = session.run(None, values)
    return logits, *caches


def test_group_is_smoothed_only_if_supported_by_all_graphs(written):
    _, runner = written
    graph, other = (ir.load(runner.path("decoder")).graph for _ in range(2))
    alone, both = (
        smoothing.shared_channels([graph]),
        smoothing.shared_channels([graph, other]),
    )
    assert (
        both.keys()
        == alone.keys()
        == {g.key for g in matrix_groups(graph) if smoothing.smoothing_path(g)}
    )
    last = next(group for group in reversed(matrix_groups(other)) if group.key in both)
    other.outputs.append(last.value)
    assert smoothing.shared_channels([graph, other]).keys() == both.keys() - {last.key}
    assert smoothing.shared_channels([other, graph]).keys() == both.keys() - {last.key}


def test_smoothing_reduces_error_of_value_outlier_channels(tmp_path):
    """One channel of each head of v dwarfs the others in the output projection's input."""
    runner = traced(with_outliers(model_of("llama")), tmp_path, joins_products=False)
    group = matrix_groups(ir.load(runner.path("decoder")).graph)[1]
    way = smoothing.smoothing_path(group)
    x = np.random.default_rng(0).standard_normal((48, 64)).astype(np.float32)
    x[:, 5::16] *= 256  # as v's channels there
    seen = InputStatistics.from_values(x)
    plain = schemes.per_channel_scheme(group, seen, None, tied=True)
    moved = schemes.per_channel_scheme(group, seen, way.channels, tied=True)
    assert plain.plain_error == moved.plain_error > 0.1
    assert moved.error < 0.03
