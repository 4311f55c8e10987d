"""Experts of mixtures in integers: what each op set computes of them, with which bits."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from specedge.exporter.compare.stage import open_session
from specedge.exporter.graph.weights import FILE
from specedge.exporter.quantise import choosing
from specedge.exporter.quantise.calibration import Seen
from specedge.exporter.quantise.experts import apart, mixtures
from specedge.exporter.quantise.matrices import groups, others, unfold
from specedge.exporter.quantise.rewriting import Rewriter
from specedge.exporter.quantise.storing import Store
from specedge.exporter.quantise.widening import Widener
from specedge.exporter.tracing.experts import Swiglu

E, CHOSEN, H, INNER = 16, 4, 64, 96
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0
FLOAT = TensorProto.FLOAT
SWIGLU = Swiglu(ALPHA, BETA, LIMIT)


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def weights(random):
    return {
        "w1": random.standard_normal((E, 2 * INNER, H), np.float32) / 8,
        "b1": random.standard_normal((E, 2 * INNER), np.float32),
        "w2": random.standard_normal((E, H, INNER), np.float32) / 8,
        "b2": random.standard_normal((E, H), np.float32),
    }


@pytest.fixture
def given(random):
    """Rows x [T, H], and the weights of their experts, [T, E]."""
    scores = random.standard_normal((64, E)).astype(np.float32)
    scores[np.arange(64)[:, None], scores.argsort(1)[:, :-CHOSEN]] = -np.inf
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return random.standard_normal((64, H), np.float32), 0.7 * chances


def sparse():
    """What `tracing.experts` makes of experts in `gqa`."""
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


CONSTANTS = {
    "first": np.array([0]), "last": np.array([-1]), "zero": np.array(0), "behind": np.array([2, 3]),
    "flat": np.array([E * 2 * INNER, H]), "each": np.array([0, E, INNER, 2]),
    "bias": np.array([E, INNER, 2]),
    "halves": np.array([1, 1]), "limit": np.float32(LIMIT), "under": np.float32(-LIMIT),
    "alpha": np.float32(ALPHA), "beta": np.float32(BETA), "rows": np.array([0, E * INNER]),
    "columns": np.array([E * INNER, H]), "k": np.array([CHOSEN]),
}  # fmt: skip


class Model:
    """One layer's experts in a form, whose weights lie in a file, and what they become."""

    def __init__(self, folder, weights, nodes):
        folder.mkdir(exist_ok=True)
        self.folder, self.weights = folder, weights
        path = folder / f"{nodes.__name__}.onnx"
        read = {name for node in nodes() for name in node.input}
        small = {name: value for name, value in CONSTANTS.items() if name in read}
        graph = helper.make_graph(
            nodes(), "experts",
            [helper.make_tensor_value_info("x", FLOAT, ["T", H]),
             helper.make_tensor_value_info("routing", FLOAT, ["T", E])],
            [helper.make_tensor_value_info("y", FLOAT, ["T", H])],
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


def rewritten(tmp_path, weights, given, nodes, bits=8, kind=Rewriter):
    """A session over experts in integers, and how they were chosen."""
    known = apart([Model(tmp_path / "float", weights, sparse).graph], E)
    made = Model(tmp_path / "float", weights, nodes)
    (mixture,) = mixtures(made.graph, known)
    choice = choosing.of_experts(mixture.experts, Seen.of(given[0]), bits)
    made.folder = tmp_path / f"{nodes.__name__}-{bits}-{kind.__name__}"
    made.folder.mkdir()
    with Store(made.folder) as store:
        kind(made.graph, store, frozenset()).experts(mixture, choice)
        for value in made.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.base_dir != made.folder:
                value.const_value = store.as_it_is(tensor)
    return made.session(), choice


def run(session, given, rows=slice(None)):
    return session.run(None, {"x": given[0][rows], "routing": given[1][rows]})[0]


def error(found, wanted):
    return np.sqrt(np.square(found - wanted).sum() / np.square(wanted).sum())


@pytest.mark.parametrize("nodes", [sparse, dense])
@pytest.mark.parametrize(("bits", "least", "most"), [(8, 0.002, 0.02), (4, 0.03, 0.25)])
def test_experts_in_blocks_give_what_they_gave_but_for_rounding(
    tmp_path, weights, given, nodes, bits, least, most
):
    session, choice = rewritten(tmp_path, weights, given, nodes, bits)
    wanted = run(Model(tmp_path / "whole", weights, nodes).session(), given)
    off = error(run(session, given), wanted)
    assert least < off < most
    assert choice.bits == bits
    assert least < choice.error < most


@pytest.mark.parametrize("bits", [8, 4])
def test_both_forms_read_the_same_bytes(tmp_path, weights, given, bits):
    found = [rewritten(tmp_path, weights, given, nodes, bits)[0] for nodes in (sparse, dense)]
    first, second = (run(session, given) for session in found)
    assert error(first, second) < 0.012  # x is rounded before and behind the sum over experts


@pytest.mark.parametrize("bits", [8, 4])
def test_a_rows_bits_depend_on_no_row_beside_it(tmp_path, weights, given, bits):
    """Of four experts a row: what one node adds up depends on threads and on the other rows."""
    session, _ = rewritten(tmp_path, weights, given, sparse, bits)
    whole = run(session, given)
    for length in (1, 2, 3, 5, 9):
        for start in range(0, 60 - length, length):
            rows = slice(start, start + length)
            assert np.array_equal(run(session, given, rows), whole[rows])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_graph_with_a_type_widens_the_same_integers(tmp_path, weights, given, bits):
    """Without what x loses by rounding."""
    session, _ = rewritten(tmp_path, weights, given, sparse, bits, Widener)
    plain, _ = rewritten(tmp_path, weights, given, sparse, bits)
    assert error(run(session, given), run(plain, given)) < 0.015


def test_the_error_of_experts_is_that_of_the_worst(tmp_path, weights, given):
    weights["w2"][8, :, ::32] *= 8  # measured are 0, 4, 8 and 12
    _, choice = rewritten(tmp_path, weights, given, sparse)
    x = torch.from_numpy(given[0])
    inner = SWIGLU(*(x @ torch.from_numpy(weights["w1"][8][half::2]).T for half in (0, 1)))
    blocks = choosing.rounding.error_in_blocks(
        torch.from_numpy(weights["w2"][8]).T, inner.numpy(), 8
    )
    assert blocks > 0.013
    assert choice.error == pytest.approx(blocks)


def test_experts_whose_sizes_are_no_whole_blocks_stay_and_the_reason_is_said(tmp_path, weights):
    cut = weights | {"w2": np.ascontiguousarray(weights["w2"][..., :80])}
    (experts,) = apart([Model(tmp_path / "float", cut, sparse).graph], E).experts
    choice = choosing.of_experts(experts, Seen.of(np.zeros((4, H), np.float32)), 8)
    assert choice.num_parts == 0
    assert "no multiples of 32" in choice.why


def routers():
    """A router, biases of what it chose, and keys that happen to be as wide."""
    node = helper.make_node
    return [
        node("Gemm", ["x", "r"], ["scores"], transB=1),
        node("Sigmoid", ["scores"], ["open"]),
        node("TopK", ["open", "k"], ["top", "chosen"]),
        node("Cast", ["chosen"], ["wide"], to=FLOAT),
        node("MatMul", ["wide", "b"], ["biases"]),
        node("MatMul", ["x", "keys"], ["key"]),
        node("Softmax", ["key"], ["more"]),
        node("MatMul", ["more", "v"], ["value"]),
        node("Add", ["value", "biases"], ["y"]),
    ]


def test_routers_are_in_no_group_and_others_of_their_width_are(tmp_path, random):
    shapes = {"r": (E, H), "b": (E, H), "keys": (H, E), "v": (E, H)}
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    graph = Model(tmp_path / "float", weights, routers).graph
    known = apart([graph], E)
    assert len(known.routers) == 2
    unfold(graph, known.places)
    found = [m.stored.tensor.name for g in groups(graph, known.places) for m in g.matrices]
    assert found == ["keys", "v"]
    assert not apart([graph], 0).places


def test_experts_are_in_no_group(tmp_path, weights):
    known = apart([Model(tmp_path / "float", weights, sparse).graph], E)
    graph = Model(tmp_path / "float", weights, dense).graph
    unfold(graph, known.places)
    found = [m.stored.tensor.name for g in groups(graph, known.places) for m in g.matrices]
    assert found == ["b2"]


def gemms(weights):
    node = helper.make_node
    return [
        node("Gemm", ["x", "w"], ["u"], transB=1),
        node("Gemm", ["x", "v", "c"], ["z"], transB=1),
        node("Gemm", ["x", "one"], ["gate"], transB=1),
        node("Sum", ["u", "z", "gate"], ["y"]),
    ]


def test_matrices_of_gemm_nodes_become_a_group_but_for_columns(tmp_path, random):
    weights = {
        "w": random.standard_normal((H, H), np.float32),
        "v": random.standard_normal((H, H), np.float32),
        "c": random.standard_normal(H).astype(np.float32),
        "one": random.standard_normal((1, H), np.float32),
    }

    def nodes():
        return gemms(weights)

    made = Model(tmp_path / "float", weights, nodes)
    x = random.standard_normal((7, H), np.float32), np.zeros((7, E), np.float32)
    wanted = x[0] @ weights["w"].T + x[0] @ weights["v"].T + weights["c"] + x[0] @ weights["one"].T
    unfold(made.graph)
    (group,) = groups(made.graph)
    assert [matrix.stored.tensor.name for matrix in group.matrices] == ["w", "v"]
    assert [node.op_type for node in made.graph].count("Gemm") == 1
    assert not others(made.graph)
    assert np.allclose(run(made.session(), x), wanted, atol=1e-4)
