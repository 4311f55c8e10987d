"""Large models are run part by part and compared as whole ones are."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from cases import exhaustive
from comparing import computed, measure, model_of, traced
from specedge.bundle.precision import ERROR_MULTIPLE
from specedge.exporter.checkpoint.placeholders import BufferPool
from specedge.exporter.graph import graphs
from specedge.exporter.graph.external_data import FILE
from specedge.exporter.tracing import geometry
from specedge.exporter.verification import parity, reference
from specedge.exporter.verification.partition import PartitionedGraph
from specedge.exporter.verification.runner import FillCaches, PassAction, ReadRows, Runner
from specedge.exporter.verification.subgraph import SubgraphSession, open_session, unpacked_options
from specedge.int8_products import UNSIGNED_OPTION


def verify_again(model, runner):
    """Verify files that were changed since they were run."""
    runner = Runner(runner.folder, list(runner.files.values()), runner.geometry)
    return parity.verify("target", computed(model, runner), runner)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_partitioned_model_is_verified_like_a_whole_one(kind, ops, tmp_path, in_parts):
    model = model_of(kind)
    runner = traced(model, tmp_path, ops)
    assert runner.num_stages > 3
    found = measure(model, runner)
    assert 0 < found.logits_error <= found.bound
    assert 0 < found.cache_error <= found.bound
    assert found.error_ratio <= ERROR_MULTIPLE
    assert found.invariant_lengths[:8] == (1, 2, 3, 5, 9, 18, 36, 64)


@pytest.mark.slow
def test_half_precision_subgraphs_equal_whole_graph(pairs, in_parts, monkeypatch):
    bundle = pairs.bundle("bfloat16")
    model = bundle.target
    shape = geometry.Geometry(
        model.context_length, model.capacity, model.padded_vocab_size, model.layers
    )
    folder, lengths = bundle.folder / "target", graphs.graph_files(4, model.context_length)
    split = Runner(folder, lengths, shape)
    monkeypatch.setattr("specedge.exporter.verification.runner.WHOLE_BYTES", 1 << 40)
    whole = Runner(folder, lengths, shape)
    zeros = [np.zeros(dims[1:], np.float32) for dims in shape.cache_shapes()]
    actions = [FillCaches(zeros.__getitem__), ReadRows(0, 9)]
    for name in ("decoder", "verify", "step"):
        tokens = np.arange(5 if name != "step" else 1)
        actions.append(PassAction(name, tokens, 2, packed=True))
    actions.append(ReadRows(0, 9))
    found, wanted = split.run(actions), whole.run(actions)
    assert split.num_stages > 3
    for a, b in zip(found[2:5], wanted[2:5], strict=True):
        assert np.array_equal(a, b)
    assert all(map(np.array_equal, found[5], wanted[5]))


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(("num_layers", "layer"), [(2, 0), (6, 3)])
def test_bitwise_difference_in_one_layer_is_detected(num_layers, layer, tmp_path, in_parts):
    model = model_of("llama", layers=num_layers)
    runner = traced(model, tmp_path)
    step = ir.load(tmp_path / "step.onnx")
    node = [n for n in step.graph if n.op_type == "Attention"][layer]
    scale = node.attributes["scale"].as_float()
    node.attributes["scale"] = ir.AttrFloat32("scale", scale * (1 + 1e-6))
    ir.save(step, tmp_path / "step.onnx")
    assert verify_again(model, runner)[1] == ["step"]


def test_values_are_released_after_their_last_reader(tmp_path, in_parts, monkeypatch):
    """A pass retains only values that later subgraphs read."""
    runner = traced(model_of("llama"), tmp_path, "gqa")
    assert runner.num_stages > 3
    held = []
    run = SubgraphSession.run

    def record(self, file, packed, values):
        held.append(set(values))
        return run(self, file, packed, values)

    monkeypatch.setattr(SubgraphSession, "run", record)
    runner.run([PassAction("decoder", np.arange(5), 0)])
    parts = PartitionedGraph(runner.path("decoder")).parts
    assert len(held) == len(parts)
    for i, names in enumerate(held[1:], 1):
        assert names <= {name for part in parts[i:] for name in part.inputs}


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize(
    ("kind", "ops"),
    [("gpt2", "gqa"), exhaustive("gemma2", "onnx")],
)
def test_only_representative_layers_are_run(kind, ops, tmp_path, in_parts):
    runner = traced(model_of(kind, layers=6), tmp_path, ops)
    assert len(runner.representatives.skipped) >= 3
    rows = runner.run([ReadRows(0, 1)], only_representative=True)[0]
    assert 4 <= len(rows) <= 8


def test_start_and_end_of_large_models_are_compared():
    shape = geometry.Geometry(1024, 1032, 512, ())
    assert reference.compared_positions(shape, 50_000_000) == [(0, 1024)]
    assert reference.compared_positions(shape, 1_500_000_000) == [(0, 32), (1012, 1024)]


def test_unsigned_subgraph_uses_converted_transposed_table(tmp_path):
    table = np.random.default_rng(0).integers(-127, 128, (64, 32), np.int8)
    (tmp_path / FILE).write_bytes(table.tobytes())
    stored = TensorProto(name="table", data_type=TensorProto.INT8, dims=table.shape)
    stored.data_location = TensorProto.EXTERNAL
    for key, value in (("location", FILE), ("offset", "0"), ("length", str(table.nbytes))):
        stored.external_data.add(key=key, value=value)
    nodes = [
        helper.make_node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMulInteger", ["x", "turned", "zero"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "head",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [3, 32])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [3, 64])],
        [stored, numpy_helper.from_array(np.uint8(128), "zero")],
    )  # fmt: skip
    path = tmp_path / "decoder.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path
    )
    split, options = PartitionedGraph(path), unpacked_options()
    options.add_session_config_entry(UNSIGNED_OPTION, "1")
    folder = "session.model_external_initializers_file_folder_path"
    options.add_session_config_entry(folder, str(tmp_path))
    x = np.random.default_rng(1).integers(0, 256, (3, 32), np.uint8)
    with split.computed(0, BufferPool()) as given:
        values = {n: ort.OrtValue.ortvalue_from_numpy(v.numpy()) for n, v in given.items()}
        for name, value in values.items():
            options.add_initializer(name, value)
        session = open_session(split.model(0), options)
        (found,) = session.run(None, {"x": x})
    assert np.array_equal(found, (x.astype(np.int32) - 128) @ table.T.astype(np.int32))
