"""Experts in both graph variants: values, batch invariance, and absence of Gather nodes."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from architectures import ARCHITECTURES
from checkpoints import VOCAB_SIZE, make_model
from specedge.bundle.graph_variants import OPS
from specedge.errors import ExportError
from specedge.exporter import Progress, model_export
from specedge.exporter.checkpoint.loader import LoadedCheckpoint
from specedge.exporter.checkpoint.placeholders import WeightSources
from specedge.exporter.tracing.attention import OPSET, TracedPass, active_pass
from specedge.exporter.tracing.experts import ExpertsModule, Swiglu, moe_reference
from specedge.exporter.tracing.families import eager_functions, registered_functions
from specedge.exporter.verification import runner
from specedge.exporter.verification.runner import FillCaches, PassAction, Runner
from specedge.exporter.verification.subgraph import open_session

NUMBER, CHOSEN, HIDDEN, INNER = 8, 2, 64, 32
_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_experts": NUMBER,
    "num_local_experts": NUMBER,
    "n_routed_experts": NUMBER,
    "num_experts_per_tok": CHOSEN,
}
SILU = Swiglu(1.0, 0.0, None)
# The name of each family's experts, their file, options, and their activation as the MoE node's.
FAMILIES = {
    "mixtral": ("Mixtral", {}, SILU),
    "qwen2_moe": ("Qwen2Moe", {}, SILU),
    "qwen3_moe": ("Qwen3Moe", {}, SILU),
    "olmoe": ("Olmoe", {}, SILU),
    "granitemoe": ("GraniteMoe", {}, SILU),
    "deepseek_v2": ("DeepseekV2", {}, SILU),
    "deepseek_v3": ("DeepseekV3", {}, SILU),
    "deepseek_v4": ("DeepseekV4", {}, replace(SILU, limit=10.0)),
    "gpt_oss": ("GptOss", {}, Swiglu(1.702, 1.0, 7.0)),
    "mixtral with gelu": ("Mixtral", {"hidden_act": "gelu"}, None),
    "nemotron_h": ("NemotronH", {}, None),
}
WITH_NODE = [name for name, (_, _, kind) in FAMILIES.items() if kind is not None]


def make_experts(family):
    name, options, _ = FAMILIES[family]
    file = family.split()[0]
    code = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
    config = getattr(transformers, f"{name}Config")(**_SIZES, **options)
    config._experts_implementation = "eager"
    module = getattr(code, f"{name}Experts")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        # Wide enough for what clamps gates and ups.
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


class Block(torch.nn.Module):
    """Experts by themselves in a graph variant; which of them each row takes is an input."""

    def __init__(self, module, ops):
        super().__init__()
        self.module, zero = module, torch.zeros(1, dtype=torch.long)
        self.one = TracedPass(ops, zero, zero[None], 8)

    def forward(self, rows, chosen, weights):
        with active_pass(self.one):
            return self.module(rows, chosen, weights)


def traced(module, ops):
    """A graph of the experts alone, with T symbolic."""
    block, names = Block(module, ops), ["rows", "chosen", "weights"]
    length = torch.export.Dim("T", min=1)
    with registered_functions(block):
        program = torch.onnx.export(
            block.eval(), inputs(5), input_names=names, output_names=["output"], dynamo=True,
            dynamic_shapes={name: {0: length} for name in names}, opset_version=OPSET,
            verbose=False,
        )  # fmt: skip
    return program.model_proto


def inputs(length):
    """Rows 0 to 4 have their first expert in common, the last expert has none."""
    generator = torch.Generator().manual_seed(length)
    rows = torch.randn(length, HIDDEN, generator=generator)
    chosen = torch.stack([torch.randperm(NUMBER - 1, generator=generator)[:2] for _ in rows])
    for row in chosen[:5]:
        row[0], row[1] = 3, 4 + row[1] % 3
    return rows, chosen, 0.1 + torch.rand(length, CHOSEN, generator=generator)


def session(proto):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    return open_session(proto.SerializeToString(), options)


def run(graph, rows, chosen, weights):
    given = {"rows": rows, "chosen": chosen, "weights": weights}
    return graph.run(None, {name: tensor.numpy() for name, tensor in given.items()})[0]


def in_float64(module, rows, chosen, weights):
    return module.double()(rows.double(), chosen, weights.double()).numpy()


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_equal_transformers_and_are_batch_invariant(family, ops):
    module, given = make_experts(family), inputs(9)
    graph = session(traced(module, ops))
    found, wanted = run(graph, *given), in_float64(module, *given)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-6 * np.abs(wanted).max())
    for length in (1, 2, 3, 5):
        for start in range(10 - length):
            some = (part[start : start + length] for part in given)
            np.testing.assert_array_equal(run(graph, *some), found[start : start + length])


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("family", WITH_NODE)
def test_float64_decomposition_of_experts_matches_transformers(family):
    module, (rows, chosen, weights) = make_experts(family), inputs(9)
    before = set(module.state_dict()) | set(vars(module)) | set(module._buffers)
    graph = traced(module, "gqa").graph
    assert set(module.state_dict()) | set(vars(module)) | set(module._buffers) == before
    assert module.config._experts_implementation == "eager"
    (node,) = (n for n in graph.node if n.op_type == "MoE")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    routing = torch.zeros(9, NUMBER, dtype=torch.float64).scatter(1, chosen, weights.double())
    (first, last), biases = ExpertsModule(module).matrices(), ExpertsModule(module).biases()
    first_bias, last_bias = (None, None) if biases is None else (biases[0].flatten(1), biases[1])
    output = moe_reference(
        rows.double(), routing.log(), first.flatten(1, 2), first_bias, last, last_bias, attributes
    )
    found = (output * routing.sum(1, keepdim=True)).numpy()
    wanted = in_float64(module, rows, chosen, weights)
    # Attributes are float32: an alpha of 1.702 is another number there.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-8 * np.abs(wanted).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_parameters_are_inferred_from_outputs(family):
    assert ExpertsModule(make_experts(family)).swiglu() == FAMILIES[family][2]


def test_experts_with_individual_norms_are_rejected():
    module = make_experts("mixtral")
    module.has_post_expert_norm = True
    block = Block(module, "onnx")
    with registered_functions(block), pytest.raises(ExportError, match="are normalized one by one"):
        block(*inputs(2))


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory):
    """A mixtral in half precision, and its files in both graph variants."""
    torch.manual_seed(0)
    model = make_model(ARCHITECTURES["mixtral"][1]()).bfloat16().float()
    folder = tmp_path_factory.mktemp("mixtral")
    loaded = LoadedCheckpoint(model, "bfloat16", WeightSources())
    part = model_export.measure_model("target", loaded, 96, 4, VOCAB_SIZE, folder, Progress())
    assert [*model_export.write_models([part], OPS)[0][0]] == [*OPS]
    return part


@pytest.mark.slow
def test_graphs_do_not_gather_expert_matrices_stored_once(whole_model):
    for path in whole_model.folder.glob("*.onnx"):
        graph = onnx.load(path, load_external_data=False).graph
        large = {t.name for t in graph.initializer if len(t.dims) > 2}
        assert not any(n.op_type == "Gather" and n.input[0] in large for n in graph.node)
        casts = {n.output[0] for n in graph.node if n.op_type == "Cast" and n.input[0] in large}
        nodes = [n for n in graph.node if n.op_type == "MoE"]
        assert bool(nodes) == ("gqa" in path.name)
        # Read as stored: reshaping first would hold two copies in memory.
        assert all({n.input[2], n.input[4]} <= casts for n in nodes)
    stored = (whole_model.folder / "weights.bin").stat().st_size
    assert stored < 1.02 * sum(p.nbytes for p in whole_model.model.parameters()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("ops", OPS)
def test_partitioned_experts_equal_whole_graph(whole_model, ops, in_parts, monkeypatch):
    given = whole_model.folder, whole_model.files, whole_model.shape, ops
    split = Runner(*given)
    monkeypatch.setattr(runner, "WHOLE_BYTES", 1 << 40)
    zeros = [np.zeros(dims[1:], np.float32) for dims in whole_model.shape.cache_shapes()]
    actions = [FillCaches(zeros.__getitem__), PassAction("decoder", np.arange(5), 2, packed=True)]
    found, wanted = split.run(actions), Runner(*given).run(actions)
    assert split.num_stages > 3
    assert np.array_equal(found[1], wanted[1])


def test_eager_experts_are_not_replaced():
    module, given = make_experts("mixtral"), inputs(3)
    block = Block(module, "onnx")
    wanted = module(*given)
    with registered_functions(block), eager_functions(block):
        assert torch.equal(block(*given), wanted)
