"""Unpacked blocks of ggml's types dequantize to gguf-py's values."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from ggml_rows import random_rows, random_weights
from specedge.exporter.checkpoint import ggml_types, quantized_tensors

SHAPE = 7, 512


@pytest.mark.parametrize("name", [*ggml_types.LAYOUTS, "IQ3_S"])
def test_rows_dequantize_to_gguf_py_values_in_strips(name, monkeypatch):
    monkeypatch.setattr(quantized_tensors, "_STRIP_SIZE", 3 * SHAPE[1])
    rows = random_rows(name, *SHAPE)
    expected = gguf.quants.dequantize(rows, Kind[name])
    assert np.array_equal(ggml_types.dequantize(rows, name), expected)


@pytest.mark.filterwarnings("error")
def test_infinite_scales_dequantize_without_warnings():
    rows = random_rows("Q4_1", *SHAPE)
    rows[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
    assert np.isnan(ggml_types.dequantize(rows, "Q4_1")[0]).any()


@pytest.mark.parametrize("name", ggml_types.LAYOUTS)
def test_unpacked_blocks_are_gguf_py_values(name):
    rows, layout = random_rows(name, *SHAPE), ggml_types.LAYOUTS[name]
    expected = gguf.quants.dequantize(rows, Kind[name])
    blocks = ggml_types.unpack(rows, name)
    assert blocks.integers.shape[-1] == layout.block_size
    assert int(blocks.integers.max()) < 2**layout.bits
    points = 2 ** (layout.bits - 1)
    if layout.has_zero_points:
        assert int(blocks.zero_points.max()) < 2**layout.bits
        points = blocks.zero_points[..., None].astype(np.float32)
    values = (blocks.integers.astype(np.float32) - points) * blocks.scales[..., None]
    if not layout.has_offsets:
        assert blocks.offsets is None
        assert np.array_equal(values.reshape(SHAPE), expected)
        return
    whole = (values + blocks.offsets[..., None]).reshape(SHAPE)
    largest = np.abs(blocks.scales[..., None]) * 32  # of the terms that both round
    size = np.broadcast_to(largest, values.shape).reshape(SHAPE) + np.abs(expected)
    assert np.all(np.abs(whole - expected) <= 2.0**-23 * size)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1", "Q2_K"])
def test_zero_points_leave_offsets_of_at_most_half_a_step(name):
    weights = np.random.default_rng(0).normal(0.02, 0.05, SHAPE).astype(np.float32)
    is_k_quant = name.endswith("_K")  # which gguf-py does not write
    rows = (
        random_weights(name, *SHAPE, 0) if is_k_quant else gguf.quants.quantize(weights, Kind[name])
    )
    blocks = ggml_types.unpack(rows, name)
    assert np.all(np.abs(blocks.offsets) <= 0.5001 * np.abs(blocks.scales))


def test_all_mxfp4_scales_are_exact():
    rows = random_rows("MXFP4", 255, 32)
    rows[:, 0] = np.arange(255)  # 0 to 2 are subnormal, 254 overflows, 255 is NaN
    blocks = ggml_types.unpack(rows, "MXFP4")
    with np.errstate(over="ignore"):
        values = (blocks.integers.astype(np.float32) - 128) * blocks.scales[..., None]
        expected = gguf.quants.dequantize(rows, Kind.MXFP4)
    assert np.array_equal(values[:, 0], expected)
