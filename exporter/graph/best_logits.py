"""Decoder graph with the best logits of each row as an extra output, for GPUs.

A row of 128,000 logits is half a megabyte to copy to the host, and most requests need only a few.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from specedge.bundle.gpu_signatures import SCORED, num_best, with_best
from specedge.bundle.manifest import ModelEntry

from .graphs import add_graph
from .nodes import FLOAT, GraphBuilder
from .shared_bytes import share_embeddings


def add_best_logits(model: ModelEntry, folder: Path) -> ModelEntry:
    """Write the graph for each variant that a GPU can run, next to the decoder.

    Returns the model's entry with the graphs. `folder` is the bundle's.
    """
    for ops in filter(model.supports_gpu, tuple(model.parity)):
        decoder = model.graph("decoder", ops)
        signature = with_best(model.signatures[decoder.signature], model.num_columns)
        graph = _append_best(ir.load(folder / decoder.file), model)
        model = add_graph(model, folder, ops, SCORED, "best_logits", signature, graph)
    return model


def _append_best(decoder: ir.Model, model: ModelEntry) -> ir.Model:
    """Add the output: each row's best logits, descending, their columns, and a finiteness flag.

    The flag is 0 if all logits of the row are finite. [1, R, 2 * num_best + 1]
    """
    share_embeddings(decoder)
    nodes, count = GraphBuilder("best", decoder.graph), num_best(model.num_columns)
    columns = decoder.graph.outputs[0]
    if model.num_columns < model.padded_vocab_size:
        columns = nodes("Slice", columns, [0], [model.num_columns], [2])
    values = nodes("TopK", columns, [count], num_outputs=2)
    (indices,) = nodes.others(values)
    is_not_finite = nodes("ReduceSum", nodes("Mul", columns, 0.0), [-1])
    best = nodes("Concat", values, nodes("Cast", indices, to=FLOAT), is_not_finite, axis=-1)
    nodes.output("best", best, FLOAT, [1, "R", 2 * count + 1])
    return decoder
