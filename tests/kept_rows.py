"""Rows of quantized tensors that the stored tensors of a float graph have."""

import numpy as np
import onnx_ir as ir

from specedge.exporter.checkpoint.quantized_rows import QuantizedRows


def match_rows(graph, tensors):
    """Return the stored tensors whose rows, or columns, are those of quantized tensors."""
    known = {
        row.tobytes(): (i, number)
        for i, tensor in enumerate(tensors)
        for number, row in enumerate(np.float32(tensor.dequantize(slice(None))))
    }
    matches = {}
    for value in graph.initializers.values():
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        array = value.const_value.numpy()
        for is_transposed in (False, True) if array.ndim == 2 else (False,):
            rows = array.T if is_transposed else array.reshape(-1, array.shape[-1])
            found = [known.get(np.ascontiguousarray(row).tobytes()) for row in rows]
            if None not in found:
                shape = rows.shape[:1] if array.ndim == 2 else array.shape[:-1]
                sources, numbers = np.array(found).T.reshape(2, *shape)
                offset = value.const_value.offset
                matches[offset] = QuantizedRows((*tensors,), sources, numbers, is_transposed)
    return matches
