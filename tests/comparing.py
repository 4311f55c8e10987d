"""A model exported into a folder, and its graphs compared with PyTorch."""

from dataclasses import replace
from functools import cached_property
from unittest import mock

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


def traced(model, folder, ops="onnx", context=None, lazy=None, hidden_layers=()):
    """Export a model's graphs; those of models with `lazy` weights have no joined products."""
    loaded = LoadedCheckpoint(model, "float32", WeightSources())
    context = context or context_of(model)
    part = model_export.measure_model(
        "target", loaded, context, 4, 512, folder, Progress(), hidden_layers=hidden_layers
    )
    model_export.write_models([replace(part, lazy=lazy)], (ops,))
    return Runner(folder, part.files, part.shape, ops)


class DeepModel:
    """Model with middle layers that are verified in float32 only, as in an export."""

    def __init__(self, model, folder, hidden_layers=()):
        self.model, loaded = model, LoadedCheckpoint(model, "float32", WeightSources())
        self.part = model_export.measure_model(
            "target", loaded, context_of(model), 4, 512, folder, Progress(),
            hidden_layers=hidden_layers,
        )  # fmt: skip
        self.traces = {}

    @cached_property
    def references(self):
        """Results of PyTorch at the positions of a large model, the start and the end."""
        context = self.part.shape.context_length
        segments = [(0, 32), (context - 12, context)]
        with mock.patch.object(reference, "compared_positions", return_value=segments):
            return model_export.compute_references(self.part, has_first_layers=True)

    def trace(self, ops):
        if ops not in self.traces:
            with patched_modules(self.model, context_of(self.model), self.part.shape.capacity):
                self.traces[ops] = TRACE(self.model, self.part.shape, ops, self.part.layers)
        return self.traces[ops]

    def verify(self, folder, ops, change, change_first=None, references=None):
        """Verify the graphs after changes, as an export does; return the changed graph."""
        graph = self.trace(ops)
        whole, first = (x.clone() for x in (graph.model, graph.first))
        change(whole.graph)
        (change_first or (lambda graph: None))(first.graph)
        part = replace(self.part, folder=folder)
        traced_model = tracer.TracedModel(whole, first)
        with mock.patch.object(tracer, "trace", return_value=traced_model):
            model_export.write_models([part], (ops,))
        return model_export.verify(part, references or self.references, None, False, ops)

    def is_changed(self, ops, change):
        """Return True if a function changes the graph."""
        graph = self.trace(ops).model.clone().graph
        before = str(graph), _values(graph)
        change(graph)
        return (str(graph), _values(graph)) != before


def _values(graph):
    return [value.const_value.tobytes() for value in graph.initializers.values()]


def graph_of(model, ops):
    """Return a model's graph in a graph variant, before it is rewritten."""
    shape = geometry.measure_geometry(model, context_of(model), 4)
    layers = tracer.observe(model, shape)
    with patched_modules(model, context_of(model), shape.capacity):
        return TRACE(model, shape, ops, layers).model


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
    return min(longest, getattr(model.config, "max_position_embeddings", longest))
