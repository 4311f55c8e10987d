"""A model exported into a folder, and its graphs compared with PyTorch."""

from checkpoints import make_config, make_model
from specedge.exporter import Progress, model_export
from specedge.exporter.checkpoint.loader import LoadedCheckpoint
from specedge.exporter.checkpoint.placeholders import WeightSources
from specedge.exporter.tracing import geometry, tracer
from specedge.exporter.tracing.module_patches import patched_modules
from specedge.exporter.verification import parity, reference
from specedge.exporter.verification.runner import Runner

CONTEXT = 96
CONTEXTS = {"gpt2": 256}  # of the exported pair; these models share its traces
TRACE = tracer.trace  # which tests replace


def traced(model, folder, ops="onnx", context=None):
    loaded = LoadedCheckpoint(model, "float32", WeightSources())
    context = context or context_of(model)
    part = model_export.measure_model("target", loaded, context, 4, 512, folder, Progress())
    model_export.write_models([part], (ops,))
    return Runner(folder, part.files, part.shape, ops)


def graph_of(model, ops):
    """Return a model's graph in a graph variant, before it is rewritten."""
    shape = geometry.measure_geometry(model, context_of(model), 4)
    layers = tracer.observe(model, shape)
    with patched_modules(model, context_of(model), shape.capacity):
        return TRACE(model, shape, ops, layers)


def computed(model, runner):
    """Return PyTorch's outputs as the reference of a graph."""
    return reference.compute_references("target", model, WeightSources(), runner.geometry, 512)


def measure(model, runner, tolerance=None, references=None):
    references = references or computed(model, runner)
    found, differing = parity.verify("target", references, runner, tolerance)
    assert differing == []
    return found


def model_of(kind="llama", **options):
    context = CONTEXTS.get(kind, CONTEXT)
    model = make_model(make_config(kind, kv_heads=2, context=context, **options))
    model.set_attn_implementation("eager")
    return model


def context_of(model):
    longest = CONTEXTS.get(model.config.model_type, CONTEXT)
    return min(longest, model.config.max_position_embeddings)
