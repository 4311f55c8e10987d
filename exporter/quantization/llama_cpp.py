"""The same weights rounded as llama.cpp's formats do, without a calibration text.

Q8_0 has a scale for every 32 numbers and rounds inputs likewise, as MatMulNBits of 8 bits does.
Q4_K has a scale and a minimum for every 32, both of 6 bits in blocks of 256; inputs stay in float.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from ..graph.weights import drop_unused
from .choosing import Choice, as_it_is
from .editing import Editor
from .experts import NOTHING, opened
from .matrices import Group, embeddings, groups
from .rounding import BLOCK
from .storing import Store
from .written import Written

FORMATS = ("Q8_0", "Q4_K")
CLASSES = {"int8": "Q8_0", "int8-block": "Q8_0", "int4": "Q4_K"}  # what a precision is compared to
_SUPER = 8  # blocks whose scales have one scale
_STEPS = 63  # of a scale or minimum of 6 bits
_SHARES = (1.0, 0.95, 0.9, 0.85)  # of a block's range: those tried
_TINY = 1e-30


def q8_0(group: Group) -> Choice:
    """Return how a group is rounded in Q8_0."""
    shapes = [matrix.stored.numbers().shape for matrix in group.matrices]
    if any(len(shape) != 2 or shape[0] % BLOCK for shape in shapes):
        return as_it_is("Q8_0 has no blocks for it")
    return Choice(None, 1, 0.0, 0.0, bits=8)


def q4_k(weights: torch.Tensor) -> torch.Tensor:
    """Return what the columns of a matrix are in Q4_K. [K, N] -> [K, N]"""
    size, width = weights.shape
    padding = -size % (BLOCK * _SUPER)
    whole = torch.nn.functional.pad(weights.float().T, (0, padding))
    blocks = whole.reshape(width, -1, _SUPER, BLOCK)
    low = blocks.amin(-1, keepdim=True).clamp_max(0)
    span = (blocks.amax(-1, keepdim=True) - low).clamp_min(_TINY)
    best, found = torch.full_like(low, torch.inf), torch.zeros_like(blocks)
    for share in _SHARES:
        scale, least = _in_six_bits(span * share / 15), _in_six_bits(-low * share)
        integers = ((blocks + least) / scale.clamp_min(_TINY)).round_().clamp_(0, 15)
        rounded = integers * scale - least
        error = (rounded - blocks).square().sum(-1, keepdim=True)
        found = torch.where(error < best, rounded, found)
        best = torch.minimum(error, best)
    return found.reshape(width, -1)[:, :size].T


def _in_six_bits(values: torch.Tensor) -> torch.Tensor:
    """Round values of blocks to 63rds of the largest beside them. [..., blocks, 1]"""
    step = values.amax(-2, keepdim=True).clamp_min(_TINY) / _STEPS
    return (values / step).round_() * step


def write_q4_k(model: Written, ops: str, folder: Path) -> None:
    """Write a decoder whose layers' matrices are what Q4_K makes of them; the head stays."""
    decoder = opened(model.decoder(ops), NOTHING)
    tables = {stored.place for _, stored in embeddings(decoder.graph)}
    with Store(folder) as store:
        editor = Editor(decoder.graph, store)
        for group in groups(decoder.graph):
            for matrix in group.matrices:
                weights = matrix.stored.numbers()
                if weights.ndim != 2 or matrix.place in tables:
                    continue
                if weights.shape[1] == model.model.padded_vocab_size:
                    continue

                def rounded(weights: torch.Tensor = weights) -> np.ndarray:
                    return q4_k(weights).contiguous().numpy()

                name = f"{matrix.stored.tensor.name}.q4_k"
                value = editor.external(store.floats(matrix.place, rounded, name))
                matrix.node.replace_input_with(1, value)
        passes.RemoveUnusedNodesPass()(decoder)
        drop_unused(decoder.graph)
        store.adopt(decoder.graph)
    ir.save(decoder, folder / model.decoder(ops).name)
