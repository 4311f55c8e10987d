"""Graphs whose layers are copies of traced ones, compared with graphs of which all are traced."""

import hashlib

import pytest
import torch

from architectures import ARCHITECTURES
from cases import exhaustive, slow
from checkpoints import make_config, make_model
from specedge.exporter.checkpoint.decoder_layers import layer_list
from specedge.exporter.graph import graphs, rewrites
from specedge.exporter.tracing import geometry, tracer
from specedge.exporter.tracing.module_patches import freeze_rotary, patched_modules

CONTEXT = 64


def model_with(name, num_layers=4):
    """A model of a tested family with more layers."""
    config = ARCHITECTURES[name][1]()
    if types := getattr(config, "layer_types", None):
        config.layer_types = [types[i % len(types)] for i in range(num_layers)]
    config.num_hidden_layers = num_layers
    model = make_model(config)
    freeze_rotary(model, CONTEXT)
    return model


def observed(model):
    shape = geometry.measure_geometry(model, CONTEXT, 4)
    return shape, tracer.observe(model, shape)


def traced(model, shape, layers, ops):
    with patched_modules(model, CONTEXT, shape.capacity):
        graph_model = tracer.trace(model, shape, ops, layers).model
    rewrites.remove_transposes(graph_model.graph)
    graphs.strip_metadata(graph_model)
    return graph_model.graph


def digests(graph):
    """A digest of each output: of the nodes and constants that compute it, without their names."""
    found = {}
    for value in graph.inputs:
        found[value] = repr((value.name, value.shape, value.dtype)).encode()
    for value in graph.initializers.values():
        array = value.const_value.numpy()
        found[value] = repr((array.shape, array.dtype)).encode() + array.tobytes()
    for node in graph:
        attributes = sorted((name, str(x.value)) for name, x in node.attributes.items())
        inputs = [b"" if x is None else found[x] for x in node.inputs]
        if node.op_type == "Identity":
            found[node.outputs[0]] = inputs[0]
            continue
        for i, output in enumerate(node.outputs):
            text = repr((node.domain, node.op_type, attributes, i, output.shape, output.dtype))
            found[output] = hashlib.sha256(text.encode() + b"|".join(inputs)).digest()
    return [(value.name, found[value]) for value in graph.outputs]


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("gemma3_text", "gqa"),
        ("gpt2", "onnx"),
        *(slow(name, ops) for name in ("falcon", "bloom", "mixtral") for ops in ("onnx", "gqa")),
        *(
            exhaustive(name, ops)
            for name in ARCHITECTURES
            for ops in ("onnx", "gqa")
            if name != "deepseek_v3"  # equal in float64, but its values are padded in other steps
        ),
    ],
)
def test_graph_of_copied_layers_is_the_graph_of_traced_ones(name, ops):
    model = model_with(name)
    shape, layers = observed(model)
    if ops == "gqa" and any(layer.gqa_obstacle() for layer in layers.attention):
        pytest.skip("not supported")
    whole = tracer.ObservedLayers(layers.attention, ())
    copied, expected = (traced(model, shape, x, ops) for x in (layers, whole))
    assert digests(copied) == digests(expected)
    assert len(copied) == len(expected)


def test_equal_weights_of_layers_stay_separate():
    """Otherwise the layer that has them differs from those of its kind in its nodes' inputs."""
    model = model_with("llama")
    layer = model.model.layers[2]
    layer.post_attention_layernorm.weight.data.copy_(layer.input_layernorm.weight)
    shape, layers = observed(model)
    names = {str(name) for name in traced(model, shape, layers, "gqa").initializers}
    parameters = (name for name, _ in model.named_parameters())
    norms = {f"model.{name}" for name in parameters if name.endswith("layernorm.weight")}
    assert len(norms) == 8
    assert norms <= names


def test_only_first_layers_of_each_kind_are_traced(monkeypatch):
    model, counts = model_with("gemma3_text", 6), []
    translate = tracer.translate

    def counted(whole, shape):
        counts.append((len(layer_list(whole.model)[1]), len(shape.layers)))
        return translate(whole, shape)

    monkeypatch.setattr(tracer, "translate", counted)
    shape, layers = observed(model)
    assert layers.kinds == (0, 1, 0, 1, 0, 1)
    graph = traced(model, shape, layers, "onnx")
    assert counts == [(2, 2)]
    assert [v.name for v in graph.inputs][2:] == shape.cache_names()
    assert len(layer_list(model)[1]) == model.config.num_hidden_layers == 6


def kinds_after(change, num_layers=4):
    model = make_model(make_config("llama", layers=num_layers, kv_heads=2, context=CONTEXT))
    change(model)
    return observed(model)[1].kinds


def test_equal_layers_are_of_one_kind():
    assert kinds_after(lambda model: None) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1e-3),
        lambda layer: setattr(layer.self_attn, "scaling", 0.5),
        lambda layer: setattr(layer.mlp, "act_fn", torch.nn.Tanh()),
        lambda layer: setattr(layer.mlp.up_proj, "bias", torch.nn.Parameter(torch.ones(128))),
        lambda layer: layer.register_buffer("scale", torch.ones(1)),
    ],
)
def test_layer_with_another_attribute_is_of_another_kind(change):
    assert kinds_after(lambda model: change(model.model.layers[2])) == (0, 0, 2, 0)


def test_layer_with_another_argument_is_of_another_kind():
    def change(model):
        model.model.layers[1].register_forward_pre_hook(
            lambda _, args, options: (args, {**options, "position_ids": torch.arange(5)[None]}),
            with_kwargs=True,
            prepend=True,
        )

    assert kinds_after(change) == (0, 1, 0, 0)


def test_layer_with_another_config_value_is_of_another_kind():
    def change(model):
        model.config.no_rope_layers = [1, 1, 0, 1]

    assert kinds_after(change) == (0, 0, 2, 0)


def test_layers_with_shared_weights_are_not_separated():
    def change(model):
        first, *_, last = model.model.layers
        last.mlp.up_proj.weight = first.mlp.up_proj.weight

    assert kinds_after(change) == ()


def test_layer_with_a_constant_made_from_its_weights_is_traced():
    """A constant that a layer computes outside of the graph is not that of another layer."""
    model = make_model(make_config("llama", layers=3, kv_heads=2, context=CONTEXT))
    for layer in model.model.layers:
        layer.forward = _with_constant(layer.forward, layer.mlp.up_proj.weight)
    shape, layers = observed(model)
    assert layers.kinds == (0, 0, 0)
    graph = traced(model, shape, layers, "onnx")
    assert len({d for name, d in digests(graph) if name.startswith("present")}) == 6
    whole = traced(model, shape, tracer.ObservedLayers(layers.attention, ()), "onnx")
    assert digests(graph) == digests(whole)


def _with_constant(forward, weight):
    values = weight[0, :64].tolist()

    def changed(hidden_states, *args, **options):
        return forward(hidden_states, *args, **options) + torch.tensor(values)

    return changed
