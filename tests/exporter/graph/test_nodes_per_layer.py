"""Nodes of the graphs for GPUs, each of which is at least one kernel launch."""

from collections import Counter

import onnx_ir as ir
import pytest

import ggufs
from architectures import ARCHITECTURES
from cases import exhaustive, slow
from checkpoints import make_config, make_model, make_tokenizer, save
from comparing import traced
from specedge.exporter import export
from specedge.exporter.graph import graphs
from specedge.exporter.quantization.float_model import convert_types

OPS = "gqa-fp16"
VIEWS = ("Reshape", "Squeeze", "Unsqueeze")  # without a kernel
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
POSITIONS = 6  # number of tokens, and the last one's position, in passes of any length
ROWS = 2  # of the last two terms of the residual stream, as not all rows have logits


def count_nodes(name, num_layers, folder):
    """Count the nodes of each file, except views and nodes over constants, which are folded."""
    config = ARCHITECTURES[name][1]()
    config.num_hidden_layers = num_layers
    if types := getattr(config, "layer_types", None):
        config.layer_types = (types[:2] * num_layers)[:num_layers]
    folder.mkdir()
    files = [x for x in traced(make_model(config), folder, "gqa").files.values() if x.name in FILES]
    model = ir.load(folder / "source-gqa.onnx")
    convert_types(model, OPS)
    graphs.write_graphs(model, folder, files, OPS)
    return {x.name: count_launches(ir.load(folder / x.file_name(OPS)).graph) for x in files}


def count_launches(graph):
    constants = {*graph.initializers.values()}
    for node in graph:
        if {*filter(None, node.inputs)} <= constants:
            constants |= {*node.outputs}
    nodes = [node for node in graph if node.op_type not in VIEWS]
    return sum(not {*node.outputs} <= constants for node in nodes)


BY_DEFAULT = ("llama", "qwen3", "gpt2")


@pytest.mark.parametrize("name", [x if x in BY_DEFAULT else slow(x) for x in NODES])
def test_graph_has_no_more_nodes(name, tmp_path):
    two, four = (count_nodes(name, n, tmp_path / str(n)) for n in (2, 4))
    layers = {file: (four[file] - two[file]) / 2 for file in FILES}
    num_nodes, outside = NODES[name]
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
        # For offsets each product takes block sums, another product and their sum.
        exhaustive(("Q4_1", 10 + 4 * 3)),
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
            graph_nodes[role, graph.name] = count_launches(ir.load(bundle.path(graph.file)).graph)
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
