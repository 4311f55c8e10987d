"""Conversion of a graph's caches to int8 with static scales, for GroupQueryAttention.

The node rounds keys, after rotary embedding, and values to multiples of a scale per head and
channel, and multiplies cached integers by it; queries, softmax and sums stay in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from .nodes import GqaInput, add_constant, operand

# Input, output and scale of a cache.
KEYS, VALUES = (GqaInput.PAST_KEY, 1, GqaInput.K_SCALE), (GqaInput.PAST_VALUE, 2, GqaInput.V_SCALE)
LARGEST = 127  # magnitude of the integers that scales are chosen for


def quantize_caches(model: ir.Model, scales: Mapping[str, np.ndarray]) -> None:
    """Convert a model's caches to int8, in place.

    Args:
        model: Decoder before fusion.
        scales: Scales by input of a cache, [H, 1, D].
    """
    for node in [node for node in model.graph if node.op_type == "GroupQueryAttention"]:
        node.resize_inputs(max(len(node.inputs), GqaInput.V_SCALE + 1))
        for past, present, index in (KEYS, VALUES):
            cache = operand(node, past)
            assert cache.name is not None
            cache.dtype = node.outputs[present].dtype = ir.DataType.INT8
            scale = add_constant(model.graph, scales[cache.name][None], f"{cache.name}.scale")
            node.replace_input_with(index, scale)
        for name in ("k_quant_type", "v_quant_type"):
            node.attributes[name] = ir.AttrString(name, "PER_CHANNEL")
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 8)
