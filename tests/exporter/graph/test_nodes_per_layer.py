"""Nodes of the graphs for GPUs, each of which is at least one kernel launch."""

from collections import Counter

import onnx_ir as ir
import pytest
import transformers

import ggufs
from architectures import ARCHITECTURES
from cases import exhaustive, slow
from checkpoints import VOCAB_SIZE, make_config, make_model, make_tokenizer, save
from comparing import traced
from specedge.bundle.graph_variants import attention_ops
from specedge.exporter import export
from specedge.exporter.graph import graphs
from specedge.exporter.quantization.float_model import convert_types

OPS = "gqa-fp16"
VIEWS = ("Reshape", "Squeeze", "Unsqueeze")  # without a kernel
# Operators over weights, whose results would store them twice: casts, transpositions of tied
# embeddings, and the layout of int8 weights for MatMulNBits.
OVER_WEIGHTS = {"Cast", "Transpose"}
OVER_INT8 = {*OVER_WEIGHTS, "BitwiseXor", "Expand", "Pad", "Reshape"}
FILES = ("decoder", "step", "verify")  # `scored` has the nodes of `decoder` in each layer
NODES = {  # of a layer, and of a fixed-shape pass outside of layers
    "llama": (10, 6),  # five products, attention, two norms, SiLU, product of gate and up
    "qwen2": (11, 6),  # biases of queries, keys and values
    "qwen3": (13, 6),  # norms of queries and keys, and the split before them
    "gemma2": (12, 10),  # norms after attention and MLP
    "gemma3_text": (15, 7),
    "phi": (12, 9),  # rotary embedding of 8 channels, too few for attention to compute
    "phi3": (10, 6),  # a joined gate and up, and their split
    "gpt2": (9, 9),
    "mixtral": (20, 6),
    "qwen3_moe": (21, 6),
}
NODES_IN_BFLOAT16 = {
    "llama": (10, 6),
    "gpt2": (9, 9),
    "mixtral": (23, 6),  # three casts, as TopK and Log are in float32
    "dots1": (47, 6),  # a router that selects groups, and gathers the weights of experts
}
# Heads are split and transposed, caches and the mask are computed, and the last row is repeated.
NODES_IN_STANDARD_ONNX = {
    "llama": (24, 11),
    "qwen3": (26, 11),
    "gemma3_text": (27, 18),
    "gpt2": (23, 11),
}
CONFIGS = {name: make for name, (_, make) in ARCHITECTURES.items()}
CONFIGS["dots1"] = lambda: transformers.Dots1Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    moe_intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    first_k_dense_replace=0,
    max_position_embeddings=256,
)
POSITIONS = 6  # number of tokens, and the last one's position, in passes of any length
ROWS = 2  # of the last two terms of the residual stream, as not all rows have logits


def count_nodes(name, ops, num_layers, folder):
    """Count the nodes of each file in a graph variant."""
    config = CONFIGS[name]()
    config.num_hidden_layers = num_layers
    if types := getattr(config, "layer_types", None):
        config.layer_types = (types[:2] * num_layers)[:num_layers]
    folder.mkdir()
    source = attention_ops(ops)
    runner = traced(make_model(config), folder, source)
    files = [file for file in runner.files.values() if file.name in FILES]
    (decoder,) = (file for file in files if file.name == "decoder")
    model = ir.load(folder / decoder.source.file_name(source))
    convert_types(model, ops)
    graphs.write_graphs(model, folder, files, ops)
    return {x.name: count_launches(ir.load(folder / x.file_name(ops)).graph) for x in files}


def count_launches(graph, over_weights=OVER_WEIGHTS):
    """Count nodes, except views, and except those over weights that are folded at load."""
    weights = {x for x in graph.initializers.values() if is_stored(x)}
    constants = {*graph.initializers.values()}
    for node in graph:
        inputs = {*filter(None, node.inputs)}
        if node.op_type in over_weights and inputs <= constants and inputs & weights:
            weights |= {*node.outputs}
            constants |= {*node.outputs}
    nodes = [node for node in graph if node.op_type not in VIEWS]
    return sum(not {*node.outputs} <= constants for node in nodes)


def is_stored(value):
    return isinstance(value.const_value, ir.ExternalTensor)


BY_DEFAULT = ("llama", "qwen3", "gpt2")
CASES = {(name, OPS): nodes for name, nodes in NODES.items()}
CASES |= {(name, "gqa-bf16"): nodes for name, nodes in NODES_IN_BFLOAT16.items()}
CASES |= {(name, "onnx-fp16"): nodes for name, nodes in NODES_IN_STANDARD_ONNX.items()}
CASES["llama", "onnx-bf16"] = NODES_IN_STANDARD_ONNX["llama"]


def case(name, ops):
    if name == "llama" or (name in BY_DEFAULT and ops == OPS):
        return name, ops
    return slow(name, ops) if ops == OPS else exhaustive(name, ops)


@pytest.mark.parametrize(("name", "ops"), [case(*key) for key in CASES])
def test_graph_has_no_more_nodes(name, ops, tmp_path):
    two, four = (count_nodes(name, ops, n, tmp_path / str(n)) for n in (2, 4))
    layers = {file: (four[file] - two[file]) / 2 for file in FILES}
    num_nodes, outside = CASES[name, ops]
    assert layers == dict.fromkeys(FILES, num_nodes)
    others = {file: two[file] - 2 * num_nodes for file in FILES}
    assert others == dict.fromkeys(FILES, outside) | {"decoder": outside + POSITIONS + ROWS}


@pytest.fixture(
    params=[
        exhaustive(("fp32", 10)),
        slow(("int8", 11)),  # a split of gate and up instead of a product, and a rotation
        exhaustive(("int8-block", 10)),
        exhaustive(("int4", 11)),
        exhaustive(("Q4_0", 10)),
        # For offsets each product takes block sums in float32, another product and their sum.
        exhaustive(("Q4_1", 10 + 4 * (3 + 1 + 1))),
    ],
    ids=lambda param: param[0],
)
def bundle(request, tmp_path):
    """Bundle of a llama's two layers and of its first one, and the nodes of a layer."""
    precision, num_nodes = request.param
    options = {"ops": "gqa", "compute": "fp16", "precision": precision}
    path = tmp_path / "target"
    if precision in ggufs.Kind.__members__:
        options["precision"] = "keep"
        ggufs.write(path := tmp_path / "target.gguf", ggufs.Kind[precision], tmp_path, "llama")
    else:
        save(make_model(make_config("llama", kv_heads=2)), make_tokenizer(tmp_path / "words"), path)
    return export("self:1", path, tmp_path / "bundle", **options), num_nodes


def test_layer_of_any_weights_has_no_more_nodes(bundle):
    """Compare two layers with one, in one pass and in drafts of one launch."""
    (bundle, num_nodes), graph_nodes = bundle, {}
    for role, model in bundle.models.items():
        for graph in (x for x in model.graphs if x.ops == OPS):
            stored = ir.load(bundle.path(graph.file)).graph
            graph_nodes[role, graph.name] = count_launches(stored, OVER_INT8)
    for file in (*FILES, "scored"):
        assert graph_nodes["target", file] - graph_nodes["draft", file] == num_nodes
    draft, num_steps = bundle.draft, bundle.num_draft_tokens - 1
    length = draft.min_gpu_length(OPS)
    step = graph_nodes["draft", {1: "step", 2: "catchup"}[length]]
    passes = graph_nodes["draft", "decoder"] + num_steps * step
    # Token counts, its sum with the past length, choices, further sums, and the joined tokens.
    around = 4 + 1 + (num_steps + 1) + (num_steps - 1) + 1
    around += 2 * num_steps * (length - 1)  # a repeated token, and the logits of one
    assert graph_nodes["draft", "unrolled"] == passes + around
    for file in ("unrolled", "sampled"):
        nodes = Counter(x.op_type for x in ir.load(bundle.path(draft.graph(file, OPS).file)).graph)
        assert nodes["GroupQueryAttention"] == nodes["QuickGelu"] == num_steps + 1
