"""float64 references of models with float32 casts and of graphs with fused nodes."""

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from architectures import ARCHITECTURES
from checkpoints import make_model
from comparing import computed, traced
from specedge.errors import ParityError
from specedge.exporter.checkpoint.placeholders import WeightSources
from specedge.exporter.tracing import geometry
from specedge.exporter.verification import reference, structure
from specedge.exporter.verification.exact_graph import visible_inputs
from specedge.exporter.verification.exact_model import ROUNDINGS, Float64Mode, RoundingNoiseMode
from specedge.exporter.verification.exact_nodes import (
    IMPLEMENTATIONS,
    attention,
    grouped_query_attention,
)
from specedge.exporter.verification.reference import RoutingRecorder, near_routing_ties


def test_float64_mode_overrides_float32_casts():
    x = torch.full((2, 3), 1 + 1e-12, dtype=torch.float64)
    with Float64Mode():
        asked = [x.float(), x.to(torch.float32), x.type(torch.float32)]
        asked.append(torch.softmax(x, -1, torch.float32))
        assert {y.dtype for y in asked} == {torch.float64}
        assert float(x.float()[0, 0]) == 1 + 1e-12
        assert torch.nn.functional.linear(x, torch.ones(4, 3)).dtype == torch.float64


def test_constants_and_scalars_keep_float32():
    with Float64Mode():
        weight = 1.0 + torch.full((3,), 1e-12)  # as float32 has it: 1
        table = torch.arange(3).float() * 0.1
        assert table.dtype == torch.float32
        assert torch.equal(torch.ones(3, dtype=torch.float64) * weight, torch.ones(3).double())
        assert float(torch.ones((), dtype=torch.float64) * 0.1) == float(np.float32(0.1))


def test_rounding_noise_keeps_masked_scores():
    """Masks are infinite, or the lowest number, which noise must not make infinite or NaN."""
    lowest = torch.finfo(torch.float32).min
    scores = torch.zeros(ROUNDINGS, 1, 2, 2) + 1.0
    for mask in (-torch.inf, lowest):
        with RoundingNoiseMode():
            masked = scores + torch.tensor([[0.0, mask], [0.0, 0.0]])
            weights = masked.softmax(-1)
        assert (masked[:, 0, 0, 1] == mask).all()
        assert (weights[:, 0, 0, 1] == 0).all()
        assert weights.isfinite().all()


def test_rounding_noise_perturbs_all_but_the_first_sequence():
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).expand(ROUNDINGS, -1, -1)
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain = torch.nn.functional.linear(x, weight)
    with RoundingNoiseMode():
        found = torch.nn.functional.linear(x, weight)
    assert torch.equal(found[0], plain[0])
    off = ((found[1:] - plain[1:]) / plain[1:]).abs()
    assert 0 < off.max() <= 2.1 * 2.0**-23


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("name", ["falcon", "falcon, ALiBi", "codegen"])
def test_float32_rounded_scales_match_the_model(name, tmp_path):
    config = ARCHITECTURES[name][1]()
    setattr(config, "n_embd" if name == "codegen" else "hidden_size", 80)  # heads of 20
    model = make_model(config)
    runner = traced(model, tmp_path)
    parts = computed(model, runner)
    assert structure.check_structure("target", runner, parts)[0] < 1e-12


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"local_window_size": 3}, {"scale": 0.3}]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_decomposed_group_query_attention_matches_onnx_runtime(options, sinks):
    random = np.random.default_rng(0)
    heads, groups, size, capacity, length, start = 4, 2, 8, 24, 6, 5

    def draw(*shape):
        return random.standard_normal(shape).astype(np.float32)

    inputs = [draw(1, length, n * size) for n in (heads, groups, groups)]
    inputs += [draw(1, groups, capacity, size) for _ in "kv"]
    inputs += [np.array([start + length - 1], np.int32), np.array(capacity, np.int32)]
    inputs += [None, None, None, draw(1, heads, length, capacity), draw(heads) if sinks else None]
    options = {"num_heads": heads, "kv_num_heads": groups, **options}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    while not names[-1]:
        names.pop()
    node = onnx.helper.make_node(
        "GroupQueryAttention", names, ["y", "k", "v"], domain="com.microsoft", **options
    )
    found = structure._run_node(node, inputs[: len(names)])
    wide = [x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in inputs]
    wanted = grouped_query_attention(options, *wide)[0]
    assert wanted.dtype == np.float64
    assert np.abs(found - wanted).max() < 1e-6


@pytest.mark.parametrize("packed", [False, True])
def test_rotary_in_group_query_attention_matches_onnx_runtime(packed):
    random = np.random.default_rng(0)
    heads, groups, size, capacity, length, start = 4, 2, 16, 24, 6, 5

    def draw(*shape):
        return random.standard_normal(shape).astype(np.float32)

    rows = [draw(1, length, n * size) for n in (heads, groups, groups)]
    inputs = [np.concatenate(rows, -1), None, None] if packed else rows
    inputs += [draw(1, groups, capacity, size) for _ in "kv"]
    inputs += [np.array([start + length - 1], np.int32), np.array(capacity, np.int32)]
    inputs += [draw(capacity, size // 2) for _ in ("cos", "sin")]
    options = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": 1}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    node = onnx.helper.make_node(
        "GroupQueryAttention", names, ["y", "k", "v"], domain="com.microsoft", **options
    )
    found = structure._run_node(node, inputs)
    wide = [x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in inputs]
    output, keys, _ = grouped_query_attention(options, *wide)
    assert np.abs(found - output).max() < 1e-5
    for _ in range(3):  # another order of channels is the same function
        reordered = structure._permute_channels(node, wide, random)
        other, shuffled, _ = grouped_query_attention(options, *reordered)
        assert np.abs(other - output).max() < 1e-12
        assert not np.array_equal(shuffled, keys)


def test_decomposed_skip_norm_matches_onnx_runtime():
    random = np.random.default_rng(0)
    x, skip = (random.standard_normal((1, 3, 64)) for _ in range(2))
    scale = random.standard_normal(64)
    node = onnx.helper.make_node(
        "SkipSimplifiedLayerNormalization", ["x", "skip", "scale"], ["y"], domain="com.microsoft",
        epsilon=1e-5,
    )  # fmt: skip
    found = structure._run_node(node, [a.astype(np.float32) for a in (x, skip, scale)])
    wanted, _, _, total = IMPLEMENTATIONS[node.op_type]({"epsilon": 1e-5}, x, skip, scale)
    assert np.abs(found - wanted).max() < 1e-6
    assert np.array_equal(total, x + skip)


CAUSAL = np.arange(10) <= np.arange(4, 7)[:, None]


@pytest.mark.parametrize(
    ("mask", "end"),
    [
        (CAUSAL, 7),
        (CAUSAL[None, None] & (np.arange(10) > 2), 7),  # a window
        (np.where(CAUSAL, np.linspace(0, -1, 10), -np.inf)[None, None], 7),  # added, as ALiBi is
        (np.ones((3, 10), bool), 10),
        (np.ones((3, 1), bool), 10),
    ],
)
def test_masked_rows_do_not_affect_exact_attention(mask, end):
    random = np.random.default_rng(0)
    query, keys, values = (random.standard_normal((1, 2, n, 8)) for n in (3, 10, 10))
    node = onnx.helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
    cut = visible_inputs(node, [query, keys, values, mask])
    assert [x.shape[2] for x in cut[:3]] == [3, end, end]
    infos = [onnx.ValueInfoProto(name=name) for name in node.input]
    graph = onnx.helper.make_graph([node], "one", infos, [onnx.ValueInfoProto(name="y")])
    evaluator = ReferenceEvaluator(graph, opsets={"": 24})
    given = [query, keys, values, mask]
    whole, part = (
        evaluator.run(None, dict(zip(node.input, x, strict=True)))[0] for x in (given, cut)
    )
    assert np.abs(whole - part).max() < 1e-15


def test_cached_rows_are_joined_one_layer_at_a_time_and_not_kept():
    random = torch.Generator().manual_seed(0)
    before = [torch.randn(2, 5, 4, generator=random) for _ in "kv"]
    layer = reference._ContinuedCacheLayer(lambda i: before[i - 2].numpy(), 5, 1)
    new = [torch.randn(3, 2, 2, 4, generator=random) for _ in range(4)]
    assert layer.get_seq_length() == 5
    layer.update(new[0], new[1])
    assert layer.get_seq_length() == 7
    keys, values = layer.update(new[2], new[3])
    for found, rows, added in ((keys, before[0], new[0::2]), (values, before[1], new[1::2])):
        assert torch.equal(found, torch.cat((rows.expand(3, 2, 5, 4), *added), 2))
    assert torch.equal(layer.keys, torch.cat(new[0::2], 2))
    assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 4


def choices(scores):
    found = RoutingRecorder()
    found.scores = [(slice(0, len(scores)), scores, 2)]
    return found


def test_router_near_tie_is_detected():
    exact = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 2.0 - 1e-7], [3.0, 3.0, 1.0]])
    rounded = np.concatenate([exact, exact + 1e-7])
    assert near_routing_ties(choices(exact), choices(rounded), 3).tolist() == [False, True, False]


def test_tokens_with_routing_near_ties_are_resampled():
    model = make_model(ARCHITECTURES["mixtral"][1]())
    shape = geometry.measure_geometry(model, 12, 4)
    (plain,) = reference.compute_references("target", model, WeightSources(), shape, 512)
    assert plain.left_out == 0
    gate = model.model.layers[0].mlp.gate.weight
    with torch.no_grad():  # two experts that the second and the third place are always between
        gate[2] = gate[1] * (1 + 1e-7)
        gate[0] = 0
    with_ties = plain.tokens.copy()
    (found,) = reference.compute_references("target", model, WeightSources(), shape, 512)
    assert found.left_out > 0
    assert (found.tokens != with_ties).any()


def test_always_tied_router_is_rejected(monkeypatch):
    monkeypatch.setattr(reference, "MAX_RESAMPLINGS", 2)
    model = make_model(ARCHITECTURES["mixtral"][1]())
    shape = geometry.measure_geometry(model, 32, 4)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
    with pytest.raises(ParityError, match="margins are below the float32 error for 32 of 32"):
        reference.compute_references("target", model, WeightSources(), shape, 512)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"softcap": 2.0}])
@pytest.mark.parametrize("mask", [None, CAUSAL[None, None], np.where(CAUSAL, 0.5, -np.inf)])
def test_decomposed_attention_matches_onnx_runtime(options, mask):
    random = np.random.default_rng(0)
    shapes = ((1, 4, 3, 8), (1, 2, 10, 8), (1, 2, 10, 8))
    inputs = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
    names = ["q", "k", "v"]
    given = [*inputs]
    if mask is not None:
        names.append("mask")
        given.append(mask if mask.dtype == bool else mask.astype(np.float32))
    node = onnx.helper.make_node("Attention", names, ["y"], **options)
    found = structure._run_node(node, given)
    wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in given]
    wanted = attention(options, *wide)[0]
    assert wanted.dtype == np.float64
    assert np.abs(found - wanted).max() < 1e-6
