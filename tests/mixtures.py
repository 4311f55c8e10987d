"""Expert layers in each graph form, and their quantized counterparts."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from specedge.exporter.graph.external_data import FILE
from specedge.exporter.quantization import schemes
from specedge.exporter.quantization.calibration import InputStatistics
from specedge.exporter.quantization.experts import expert_layers, find_excluded
from specedge.exporter.quantization.integer_rewriter import IntegerRewriter
from specedge.exporter.quantization.weights_writer import WeightsWriter
from specedge.exporter.tracing.experts import Swiglu
from specedge.exporter.verification.subgraph import open_session

E, CHOSEN, H, INNER = 16, 4, 64, 96
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0
FLOAT = TensorProto.FLOAT
SWIGLU = Swiglu(ALPHA, BETA, LIMIT)


def sparse():
    """Return the `gqa` form of experts by `tracing.experts`."""
    node = helper.make_node
    return [
        node("Log", ["routing"], ["log"]),
        node("Unsqueeze", ["x", "first"], ["one"]),
        node("Concat", ["one", "one"], ["twice"], axis=0),
        node("Concat", ["log", "log"], ["logits"], axis=0),
        node("MoE", ["twice", "logits", "w1", "b1", "w2", "b2"], ["both"], domain="com.microsoft",
             k=CHOSEN, activation_type="swiglu", swiglu_fusion=1, activation_alpha=ALPHA,
             activation_beta=BETA, swiglu_limit=LIMIT, normalize_routing_weights=1),
        node("Gather", ["both", "zero"], ["half"], axis=0),
        node("ReduceSum", ["routing", "last"], ["sum"], keepdims=1),
        node("Mul", ["half", "sum"], ["y"]),
    ]  # fmt: skip


def dense():
    """And in `onnx`."""
    node = helper.make_node
    return [
        node("Reshape", ["w1", "flat"], ["w"]),
        node("Gemm", ["x", "w"], ["inner"], transB=1),
        node("Reshape", ["inner", "each"], ["unbiased"]),
        node("Reshape", ["b1", "bias"], ["b"]),
        node("Add", ["unbiased", "b"], ["pairs"]),
        node("Split", ["pairs", "halves"], ["gate", "up"], axis=-1),
        node("Clip", ["gate", "", "limit"], ["gates"]),
        node("Clip", ["up", "under", "limit"], ["ups"]),
        node("Mul", ["gates", "alpha"], ["scaled"]),
        node("Sigmoid", ["scaled"], ["open"]),
        node("Mul", ["gates", "open"], ["gated"]),
        node("Add", ["ups", "beta"], ["above"]),
        node("Mul", ["gated", "above"], ["outer"]),
        node("Unsqueeze", ["routing", "behind"], ["by"]),
        node("Mul", ["outer", "by"], ["weighed"]),
        node("Reshape", ["weighed", "rows"], ["wide"]),
        node("Transpose", ["w2"], ["turned"], perm=[0, 2, 1]),
        node("Reshape", ["turned", "columns"], ["side"]),
        node("MatMul", ["wide", "side"], ["z"]),
        node("MatMul", ["routing", "b2"], ["biases"]),
        node("Add", ["z", "biases"], ["y"]),
    ]


def constants(size, inner_size):
    """Return the small inputs of experts of these sizes."""
    return {
        "first": np.array([0]), "last": np.array([-1]), "zero": np.array(0),
        "behind": np.array([2, 3]), "flat": np.array([E * 2 * inner_size, size]),
        "each": np.array([0, E, inner_size, 2]), "bias": np.array([E, inner_size, 2]),
        "halves": np.array([1, 1]), "limit": np.float32(LIMIT), "under": np.float32(-LIMIT),
        "alpha": np.float32(ALPHA), "beta": np.float32(BETA),
        "rows": np.array([0, E * inner_size]), "columns": np.array([E * inner_size, size]),
        "k": np.array([CHOSEN]),
    }  # fmt: skip


class Model:
    """One layer's experts in a form, whose weights lie in a file, and what they become."""

    def __init__(self, folder, weights, nodes):
        folder.mkdir(exist_ok=True)
        self.folder, self.weights = folder, weights
        path = folder / f"{nodes.__name__}.onnx"
        read = {name for node in nodes() for name in node.input}
        inner_size, size = (
            (n for n in weights["w2"].shape[:0:-1]) if "w2" in weights else (INNER, H)
        )
        small = {n: value for n, value in constants(size, inner_size).items() if n in read}
        graph = helper.make_graph(
            nodes(), "experts",
            [helper.make_tensor_value_info("x", FLOAT, ["T", size]),
             helper.make_tensor_value_info("routing", FLOAT, ["T", E])],
            [helper.make_tensor_value_info("y", FLOAT, ["T", size])],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in small.items()],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        self.model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
        for value in (value for node in self.model.graph for value in node.outputs):
            value.dtype = value.dtype or ir.DataType.FLOAT
        at, pieces = 0, []
        for name, array in weights.items():  # in one order for both forms
            tensor = ir.ExternalTensor(
                FILE, at, array.nbytes, ir.DataType.FLOAT, shape=ir.Shape(array.shape), name=name,
                base_dir=folder,
            )  # fmt: skip
            value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype),
                             const_value=tensor)  # fmt: skip
            self.model.graph.register_initializer(value)
            for node in self.model.graph:
                for index, known in enumerate(node.inputs):
                    if known is not None and known.name == name:
                        node.replace_input_with(index, value)
            at += array.nbytes
            pieces.append(array.tobytes())
        (folder / FILE).write_bytes(b"".join(pieces))
        ir.save(self.model, path)
        self.graph = self.model.graph

    def session(self):
        path = self.folder / "made.onnx"
        ir.save(self.model, path)
        return open_session(path, ort.SessionOptions())


def rewritten(tmp_path, weights, given, nodes, bits=8, kind=IntegerRewriter):
    """A session over experts in integers, and how they were chosen."""
    known = find_excluded([Model(tmp_path / "float", weights, sparse).graph], E)
    made = Model(tmp_path / "float", weights, nodes)
    (mixture,) = expert_layers(made.graph, known)
    choice = schemes.expert_scheme(mixture.experts, InputStatistics.from_values(given[0]), bits)
    made.folder = tmp_path / f"{nodes.__name__}-{bits}-{kind.__name__}"
    made.folder.mkdir()
    with WeightsWriter(made.folder) as store:
        kind(made.graph, store, {}).experts(mixture, choice)
        store.adopt(made.graph)
    return made.session(), choice


def run(session, given, rows=slice(None)):
    return session.run(None, {"x": given[0][rows], "routing": given[1][rows]})[0]


def error(found, wanted):
    return np.sqrt(np.square(found - wanted).sum() / np.square(wanted).sum())
