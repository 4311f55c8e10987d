"""Quantization formats of llama.cpp, applied to the same weights for comparison.

Q8_0 quantizes weights and activations with a scale for every 32 values, as 8-bit MatMulNBits does.
Q4_K has a 6-bit scale and minimum for every 32 values, in blocks of 256; activations stay float.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from ..graph.external_data import drop_unused
from .experts import NO_EXCLUSIONS, load_graph
from .float_model import FloatModel
from .graph_editor import GraphEditor
from .matrices import MatrixGroup, embeddings, matrix_groups
from .rounding import BLOCK_SIZE
from .schemes import Scheme, unquantized
from .weights_writer import WeightsWriter

FORMATS = ("Q8_0", "Q4_K")
COMPARABLE_FORMATS = {"int8": "Q8_0", "int8-block": "Q8_0", "int4": "Q4_K"}  # by precision
_SUPER_BLOCK_SIZE = 8  # blocks of a super-block, whose scales share a scale
_MAX_SCALE = 63  # maximum of 6-bit scales and minima
_RANGE_FACTORS = (1.0, 0.95, 0.9, 0.85)  # candidate fractions of a block's range
_TINY = 1e-30


def q8_0_scheme(group: MatrixGroup) -> Scheme:
    """Return the scheme of a group in Q8_0."""
    shapes = [matrix.stored.data().shape for matrix in group.matrices]
    if any(len(shape) != 2 or shape[0] % BLOCK_SIZE for shape in shapes):
        return unquantized("its size is not a multiple of Q8_0's block size")
    return Scheme(None, 1, 0.0, 0.0, bits=8)


def round_q4_k(weights: torch.Tensor) -> torch.Tensor:
    """Return a matrix rounded to Q4_K, dequantized. [K, N] -> [K, N]"""
    size, width = weights.shape
    padding = -size % (BLOCK_SIZE * _SUPER_BLOCK_SIZE)
    whole = torch.nn.functional.pad(weights.float().T, (0, padding))
    blocks = whole.reshape(width, -1, _SUPER_BLOCK_SIZE, BLOCK_SIZE)
    low = blocks.amin(-1, keepdim=True).clamp_max(0)
    span = (blocks.amax(-1, keepdim=True) - low).clamp_min(_TINY)
    best_error, best_blocks = torch.full_like(low, torch.inf), torch.zeros_like(blocks)
    for share in _RANGE_FACTORS:
        scale, minimum = _round_six_bits(span * share / 15), _round_six_bits(-low * share)
        integers = ((blocks + minimum) / scale.clamp_min(_TINY)).round_().clamp_(0, 15)
        rounded = integers * scale - minimum
        error = (rounded - blocks).square().sum(-1, keepdim=True)
        best_blocks = torch.where(error < best_error, rounded, best_blocks)
        best_error = torch.minimum(error, best_error)
    return best_blocks.reshape(width, -1)[:, :size].T


def _round_six_bits(values: torch.Tensor) -> torch.Tensor:
    """Round values of blocks to 6 bits relative to their super-block. [..., blocks, 1]"""
    step = values.amax(-2, keepdim=True).clamp_min(_TINY) / _MAX_SCALE
    return (values / step).round_() * step


def write_q4_k(model: FloatModel, ops: str, folder: Path) -> None:
    """Write a decoder whose layers are rounded to Q4_K; LM head and embedding stay float."""
    decoder = load_graph(model.decoder(ops), NO_EXCLUSIONS)
    tables = {stored.offset for _, stored in embeddings(decoder.graph)}
    with WeightsWriter(folder) as store:
        editor = GraphEditor(decoder.graph, store)
        for group in matrix_groups(decoder.graph):
            for matrix in group.matrices:
                weights = matrix.stored.data()
                if weights.ndim != 2 or matrix.offset in tables:
                    continue
                if weights.shape[1] == model.model.padded_vocab_size:
                    continue

                def rounded(weights: torch.Tensor = weights) -> np.ndarray:
                    return round_q4_k(weights).contiguous().numpy()

                name = f"{matrix.stored.tensor.name}.q4_k"
                value = editor.external(store.array(matrix.offset, rounded, name))
                matrix.node.replace_input_with(1, value)
        passes.RemoveUnusedNodesPass()(decoder)
        drop_unused(decoder.graph)
        store.adopt(decoder.graph)
    ir.save(decoder, folder / model.decoder(ops).name)
