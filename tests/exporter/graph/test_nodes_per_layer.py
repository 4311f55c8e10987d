"""Nodes per layer of the graphs for GPUs, each of which is at least one kernel launch."""

import onnx_ir as ir
import pytest

from architectures import ARCHITECTURES
from cases import slow
from checkpoints import make_model
from comparing import traced
from specedge.exporter.graph import graphs
from specedge.exporter.quantization.float_model import convert_types

OPS = "gqa-fp16"
VIEWS = ("Reshape", "Squeeze", "Unsqueeze")  # without a kernel
NODES = {
    "llama": 10,  # five products, attention, two norms, SiLU, product of gate and up
    "qwen2": 11,  # biases of queries, keys and values
    "qwen3": 13,  # norms of queries and keys, and the split before them
    "gemma2": 12,  # norms after attention and MLP
    "gemma3_text": 15,
    "phi": 16,  # rotary embedding of 8 channels, too few for attention to compute
    "phi3": 10,  # a joined gate and up, and their split
    "gpt2": 14,
    "mixtral": 25,
    "qwen3_moe": 24,
}


def count_nodes(name, num_layers, file_name, folder):
    """Count a file's nodes, except views and nodes over constants, which are folded."""
    config = ARCHITECTURES[name][1]()
    config.num_hidden_layers = num_layers
    if types := getattr(config, "layer_types", None):
        config.layer_types = (types[:2] * num_layers)[:num_layers]
    folder.mkdir()
    files = traced(make_model(config), folder, "gqa").files.values()
    model = ir.load(folder / "source-gqa.onnx")
    convert_types(model, OPS)
    (file,) = (file for file in files if file.name == file_name)
    graphs.write_graphs(model, folder, [file], OPS)
    graph = ir.load(folder / file.file_name(OPS)).graph
    constants = {*graph.initializers.values()}
    for node in graph:
        if {*filter(None, node.inputs)} <= constants:
            constants |= {*node.outputs}
    nodes = [node for node in graph if node.op_type not in VIEWS]
    return sum(not {*node.outputs} <= constants for node in nodes)


@pytest.mark.parametrize("name", ["llama", *map(slow, [*NODES][1:])])
@pytest.mark.parametrize("file_name", ["step", "verify", "decoder"])
def test_layer_has_no_more_nodes(name, file_name, tmp_path):
    two, four = (count_nodes(name, n, file_name, tmp_path / str(n)) for n in (2, 4))
    assert (four - two) / 2 == NODES[name]
