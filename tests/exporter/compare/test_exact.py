"""Exact results, of a model whose code asks for float32 and of a graph with fused nodes."""

import numpy as np
import onnx
import pytest
import torch

from architectures import ARCHITECTURES
from checkpoints import make_model
from comparing import computed, traced
from specedge.exporter.checkpoint.lazy_weights import Sources
from specedge.exporter.compare import reference, structure
from specedge.exporter.compare.exact_graph import grouped_query_attention
from specedge.exporter.compare.exact_model import ROUNDINGS, Exact, Nudged
from specedge.exporter.compare.routing import Choices, close
from specedge.exporter.tracing import geometry


def test_float64_stays_float64_where_code_asks_for_float32():
    x = torch.full((2, 3), 1 + 1e-12, dtype=torch.float64)
    with Exact():
        asked = [x.float(), x.to(torch.float32), x.type(torch.float32)]
        asked.append(torch.softmax(x, -1, torch.float32))
        assert {y.dtype for y in asked} == {torch.float64}
        assert float(x.float()[0, 0]) == 1 + 1e-12
        assert torch.nn.functional.linear(x, torch.ones(4, 3)).dtype == torch.float64


def test_constants_and_scalars_keep_float32():
    with Exact():
        weight = 1.0 + torch.full((3,), 1e-12)  # as float32 has it: 1
        table = torch.arange(3).float() * 0.1
        assert table.dtype == torch.float32
        assert torch.equal(torch.ones(3, dtype=torch.float64) * weight, torch.ones(3).double())
        assert float(torch.ones((), dtype=torch.float64) * 0.1) == float(np.float32(0.1))


def test_nudged_runs_are_near_the_first_which_is_pytorchs_own():
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).expand(ROUNDINGS, -1, -1)
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain = torch.nn.functional.linear(x, weight)
    with Nudged():
        found = torch.nn.functional.linear(x, weight)
    assert torch.equal(found[0], plain[0])
    off = ((found[1:] - plain[1:]) / plain[1:]).abs()
    assert 0 < off.max() <= 2.1 * 2.0**-23


@pytest.mark.parametrize("name", ["falcon", "falcon, ALiBi", "codegen"])
def test_scales_that_float32_rounds_are_the_models_own(name, tmp_path):
    config = ARCHITECTURES[name][1]()
    setattr(config, "n_embd" if name == "codegen" else "hidden_size", 80)  # heads of 20
    model = make_model(config)
    player = traced(model, tmp_path)
    parts = computed(model, player)
    path = player.path("decoder")
    assert structure.check("target", path, player.geometry, parts)[0] < 1e-12


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"local_window_size": 3}, {"scale": 0.3}]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_the_spelled_out_form_of_grouped_query_attention_is_onnx_runtimes(options, sinks):
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
    found = structure._run(node, inputs[: len(names)])
    wide = [x.astype(np.float64) if x is not None and x.dtype == np.float32 else x for x in inputs]
    wanted = grouped_query_attention(options, *wide)[0]
    assert wanted.dtype == np.float64
    assert np.abs(found - wanted).max() < 1e-6


def choices(scores):
    found = Choices()
    found.scores = [(slice(0, len(scores)), scores, 2)]
    return found


def test_a_router_that_rounding_could_turn_is_found():
    exact = np.array([[3.0, 2.0, 1.0], [3.0, 2.0, 2.0 - 1e-7], [3.0, 3.0, 1.0]])
    rounded = np.concatenate([exact, exact + 1e-7])
    assert close(choices(exact), choices(rounded), 3).tolist() == [False, True, False]


def test_tokens_that_rounding_could_send_to_other_experts_are_drawn_anew():
    model = make_model(ARCHITECTURES["mixtral"][1]())
    shape = geometry.measure(model, 32, 4)
    (plain,) = reference.references("target", model, Sources(), shape, 512)
    assert plain.left_out == 0
    gate = model.model.layers[0].mlp.gate.weight
    with torch.no_grad():  # two experts that the second and the third place are always between
        gate[2] = gate[1] * (1 + 1e-7)
        gate[0] = 0
    with_ties = plain.tokens.copy()
    (found,) = reference.references("target", model, Sources(), shape, 512)
    assert 0 < found.left_out < reference.TRIES
    assert (found.tokens != with_ties).any()
