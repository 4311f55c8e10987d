"""A graph whose layers were repeated is the one that is traced whole."""

import hashlib

import pytest
import torch

from architectures import ARCHITECTURES
from checkpoints import make_model
from comparing import CONTEXT, model_of
from specedge.exporter.tracing import geometry, like_layers, repeating, tracing
from specedge.exporter.tracing.families import registered
from specedge.exporter.tracing.like_layers import UnlikeError
from specedge.exporter.tracing.module_patches import swapped

WINDOWS = {"sliding_window": 24, "attn_logit_softcapping": 3.0, "head_dim": 16}


def text_of(value):
    """What a graph does for each output, whatever its values are called; and all that it holds."""
    array = value.const_value.numpy()
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def described(graph):
    """Each output by what it is computed from, the nodes in their order, and the weights."""
    known = {v: f"{v.name} {v.shape} {v.dtype}" for v in graph.inputs}
    known |= {v: text_of(v) for v in graph.initializers.values()}
    nodes = []
    for node in graph:
        attributes = sorted((a.name, repr(a.value)) for a in node.attributes.values())
        inputs = [v if v is None else known[v] for v in node.inputs]
        told = repr((node.domain, node.op_type, attributes, inputs))
        nodes.append(hashlib.sha256(told.encode()).hexdigest())
        known |= {v: f"{nodes[-1]} {i} {v.shape}" for i, v in enumerate(node.outputs)}
    outputs = [(v.name, known[v]) for v in graph.outputs]
    return outputs, nodes, [text_of(v) for v in graph.initializers.values()]


def parts_of(model):
    shape = geometry.measure(model, CONTEXT, 4)
    return model, shape, tracing.observe(model, shape)


def alike(model, ops="onnx"):
    """For each layer the first that it is like."""
    model, shape, layers = parts_of(model)
    whole = tracing.Traceable(model, CONTEXT, ops, layers)
    with swapped(model, CONTEXT), registered(model):
        return like_layers.find(model, shape, whole).first


def plain_first_layer(model):
    """What an optimizer could take for nothing, in the layer that is traced alone."""
    layer = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))[0]
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(float(name.endswith("weight")))
    return model


def constant_in_each_layer(model):
    """A tensor that a layer's own code makes."""
    for layer in next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
        layer.mlp.register_forward_hook(lambda module, args, output: output + torch.tensor([0.5]))
    return model


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    ("kind", "ops", "depth", "options"),
    [
        pytest.param("gpt2", "gqa", 3, {}, marks=pytest.mark.slow),
        ("qwen2", "onnx", 3, {}),
        pytest.param("gemma2", "onnx", 4, WINDOWS, marks=pytest.mark.slow(exhaustive=True)),
        pytest.param("gemma2", "gqa", 4, WINDOWS, marks=pytest.mark.slow(exhaustive=True)),
    ],
)
def test_repeated_layers_give_the_graph_that_is_traced_whole(kind, ops, depth, options):
    model = constant_in_each_layer(plain_first_layer(model_of(kind, layers=depth, **options)))
    model, shape, layers = parts_of(model)
    with swapped(model, CONTEXT):
        whole = tracing.trace(model, shape, ops, layers)
        repeated = repeating._repeated(model, shape, ops, layers)
    assert described(repeated.graph) == described(whole.graph)


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("mixtral", "gqa"),
        *(
            pytest.param(name, "onnx", marks=pytest.mark.slow(exhaustive=True))
            for name in ("mixtral", "gpt_oss", "deepseek_v3")
        ),
    ],
)
def test_repeated_layers_have_experts_of_their_own(name, ops):
    config = ARCHITECTURES[name][1]()
    config.num_hidden_layers = 4
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = 2 * kinds
    model, shape, layers = parts_of(make_model(config))
    with swapped(model, CONTEXT):
        whole = tracing.trace(model, shape, ops, layers)
        repeated = repeating._repeated(model, shape, ops, layers)
    assert described(repeated.graph) == described(whole.graph)


def test_weights_of_repeated_layers_have_types_of_their_own():
    """Storing one in 16 bits must not change what another is said to be."""
    model, shape, layers = parts_of(model_of("qwen2", layers=3))
    with swapped(model, CONTEXT):
        weights = repeating._repeated(model, shape, "onnx", layers).graph.initializers.values()
    assert len({id(value.type) for value in weights}) == len(weights)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_layers_with_weights_of_their_own_are_alike(ops):
    assert alike(model_of(layers=4), ops) == [0, 0, 0, 0]
    assert alike(model_of("gemma2", layers=4, **WINDOWS), ops) == [0, 1, 0, 1]


def changed_epsilon(layers):
    layers[2].input_layernorm.variance_epsilon *= 2


def changed_activation(layers):
    layers[2].mlp.act_fn = torch.nn.ReLU()


def changed_scale(layers):
    layers[2].self_attn.scaling *= 1.5


def dropped_bias(layers):
    layers[2].self_attn.k_proj.bias = None


def shifted_by_a_number(layers):
    layers[2].mlp.register_forward_hook(lambda module, args, output: output + 1)


def shifted_by_another_constant(layers):
    for i, layer in enumerate(layers):
        constant = 1.0 + (i == 2)
        layer.mlp.register_forward_hook(lambda m, given, y, c=constant: y + torch.tensor([c]))


@pytest.mark.parametrize(
    "change",
    [
        changed_epsilon,
        changed_activation,
        changed_scale,
        dropped_bias,
        shifted_by_a_number,
        shifted_by_another_constant,
    ],
)
def test_a_layer_that_computes_otherwise_is_like_no_other(change):
    model = model_of("qwen2", layers=4)
    change(model.model.layers)
    assert alike(model) == [0, 0, 2, 0]


def test_layers_scaled_by_their_number_are_all_unlike():
    model = model_of("gpt2", layers=4, scale_attn_by_inverse_layer_idx=True)
    assert alike(model) == [0, 1, 2, 3]


def read_another_layers_value(model):
    kept = []
    layers = model.model.layers
    layers[1].mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    layers[3].mlp.register_forward_hook(lambda module, args, output: output + kept[-1])


def read_another_layers_weight(model):
    layers = model.model.layers
    layers[3].mlp.register_forward_hook(
        lambda module, args, output: output + layers[1].input_layernorm.weight
    )


def share_a_layers_weight(model):
    layers = model.model.layers
    layers[3].mlp.up_proj.weight = layers[1].mlp.up_proj.weight


def compute_between_layers(model):
    model.model.layers[2].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    "change",
    [
        read_another_layers_value,
        read_another_layers_weight,
        share_a_layers_weight,
        compute_between_layers,
    ],
)
def test_layers_that_are_no_chain_are_not_repeated(change):
    model = model_of(layers=4)
    change(model)
    with pytest.raises(UnlikeError):
        alike(model)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    ("depth", "options", "traced"),
    [(4, {}, [1]), (3, {}, [3]), (4, {"scale_attn_by_inverse_layer_idx": True}, [4])],
)
def test_only_deep_models_of_like_layers_are_traced_in_part(depth, options, traced, monkeypatch):
    num_layers, trace = [], tracing.trace

    def counted(model, shape, *args):
        num_layers.append(len(shape.layers))
        return trace(model, shape, *args)

    monkeypatch.setattr(tracing, "trace", counted)
    monkeypatch.setattr(repeating, "DEEP", 3)
    model, shape, layers = parts_of(model_of("gpt2", layers=depth, **options))
    with swapped(model, CONTEXT):
        graph = repeating.trace(model, shape, "gqa", layers).graph
    assert num_layers == traced
    assert sum(node.op_type == "GroupQueryAttention" for node in graph) == depth


def test_a_model_is_itself_again_after_it_was_traced(monkeypatch):
    monkeypatch.setattr(repeating, "DEEP", 1)
    model = model_of(layers=2)
    tokens = torch.arange(6)[None]
    modules, before = [*model.named_modules()], model(tokens).logits
    with swapped(model, CONTEXT):
        repeating.trace(*parts_of(model)[:2], "onnx", parts_of(model)[2])
    assert [*model.named_modules()] == modules
    assert not [name for name, module in modules if "forward" in vars(module)]
    assert torch.equal(model(tokens).logits, before)


class _FaultError(Exception):
    """A fault of the exporter, not of the model."""


@pytest.mark.parametrize("error", [UnlikeError, _FaultError])
def test_only_unlike_layers_are_traced_whole(monkeypatch, error):
    model, shape, layers = parts_of(model_of("qwen2", layers=3))

    def fails(*arguments):
        raise error("layers")

    monkeypatch.setattr(repeating, "DEEP", 2)
    monkeypatch.setattr(like_layers, "find", fails)
    monkeypatch.setattr(tracing, "trace", lambda *arguments: "whole")
    if error is UnlikeError:
        assert repeating.trace(model, shape, "onnx", layers) == "whole"
        return
    with pytest.raises(_FaultError):
        repeating.trace(model, shape, "onnx", layers)
