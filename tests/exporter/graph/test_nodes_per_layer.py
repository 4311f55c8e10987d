"""Nodes per layer of the graphs for GPUs, each of which is at least one kernel launch."""

import onnx_ir as ir
import pytest

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
NODES = {
    "llama": 10,  # five products, attention, two norms, SiLU, product of gate and up
    "qwen2": 11,  # biases of queries, keys and values
    "qwen3": 13,  # norms of queries and keys, and the split before them
    "gemma2": 12,  # norms after attention and MLP
    "gemma3_text": 15,
    "phi": 12,  # rotary embedding of 8 channels, too few for attention to compute
    "phi3": 10,  # a joined gate and up, and their split
    "gpt2": 9,
    "mixtral": 25,
    "qwen3_moe": 24,
}


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
def test_layer_has_no_more_nodes(name, tmp_path):
    two, four = (count_nodes(name, n, tmp_path / str(n)) for n in (2, 4))
    counts = {file: (four[file] - two[file]) / 2 for file in FILES}
    assert counts == dict.fromkeys(FILES, NODES[name])


@pytest.mark.parametrize(
    ("precision", "num_nodes"),
    [
        slow("int8", 11),  # a split of gate and up instead of a product, and a rotation
        exhaustive("int8-block", 10),
        exhaustive("int4", 11),
    ],
)
def test_layer_with_integer_weights_has_no_more_nodes(precision, num_nodes, tmp_path):
    model, tokenizer = make_model(make_config("llama", kv_heads=2)), tmp_path / "tokenizer"
    save(model, make_tokenizer(tokenizer), tmp_path / "target")
    bundle = export(
        "self:1", tmp_path / "target", tmp_path / "bundle",
        ops="gqa", precision=precision, compute="fp16",
    )  # fmt: skip
    for file in (*FILES, "scored"):
        paths = (bundle.path(x.graph(file, OPS).file) for x in (bundle.target, bundle.draft))
        two, one = (count_launches(ir.load(path).graph) for path in paths)
        assert two - one == num_nodes
