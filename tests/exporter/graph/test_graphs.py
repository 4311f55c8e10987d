"""Contents of a bundle's files."""

import onnx
import pytest

import traces
from specedge.bundle import Bundle
from specedge.bundle.gpu_signatures import ONE_CALL, num_best
from specedge.bundle.graph_scan import weights_of
from specedge.bundle.signature import SAMPLING_SETTINGS
from specedge.exporter import export
from specedge.exporter.graph import graphs
from specedge.exporter.tracing import tracer

FORBIDDEN = {"Shape", "Size", "Range", "NonZero", "If", "Loop", "Memcpy"}


def protos(bundle):
    for model in bundle.models.values():
        for graph in model.graphs:
            yield model, graph, onnx.load(bundle.path(graph.file), load_external_data=False)


def shape(value):
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_graphs_have_only_nodes_that_gpus_run(exported):
    for _, graph, proto in protos(exported):
        assert not {node.op_type for node in proto.graph.node} & FORBIDDEN
        types = {tensor.data_type for tensor in proto.graph.initializer}
        if graph.name != "sampled":  # sums that decide a draw are in double
            assert onnx.TensorProto.DOUBLE not in types


def test_inputs_and_outputs_match_the_specification(exported):
    for model, graph, proto in protos(exported):
        length, batch = graph.length or "T", "B" if graph.name == "batched" else 1
        caches = [
            (state.name, [batch, state.shape[1], model.capacity, state.shape[3]])
            for state in model.states
        ]
        rows = graph.length or "R"
        logits = [("logits", [1, rows, model.padded_vocab_size])] if graph.length != 64 else []
        chosen = [("logits_from", [1])] if graph.name in ("decoder", "scored") else []
        made = [(f"present.{name}", dims) for name, dims in caches]
        best = (
            [("best", [1, rows, 2 * num_best(model.num_columns) + 1])]
            if graph.name == "scored"
            else []
        )
        told = []
        if graph.name in ONE_CALL:
            k, size = exported.num_draft_tokens, model.num_columns
            logits = [("drafted", [1, k])]
            if graph.name == "sampled":
                told = [
                    *((name, [1]) for name in SAMPLING_SETTINGS),
                    ("seen", [1, size]),
                    ("uniforms", [k]),
                ]
                weights = ((f"step.{i}.weights", [1, size]) for i in range(k))
                logits = [("drawn", [k, 2 * num_best(size) + 5]), *weights]
            made = [(f"step.{i}.{name}", dims) for i in range(k) for name, dims in made]
        first = [("past_length", [1]), *chosen]
        if graph.name == "batched":
            first = [
                ("positions", [1, "T"]),
                ("block_rows", ["B", "N"]),
                ("packed_rows", ["T"]),
                ("logits_rows", ["R"]),
                ("last_positions", ["B"]),
                ("query_lengths", ["B"]),
            ]
        assert [(v.name, shape(v)) for v in proto.graph.input] == [
            ("input_ids", [1, length]),
            *first,
            *((f"past_key_values.{name}", dims) for name, dims in caches),
            *told,
        ]
        assert [(v.name, shape(v)) for v in proto.graph.output] == [
            *logits,
            *made,
            *best,
        ]
        declared = model.signatures[graph.signature]
        for values, tensors in (
            (proto.graph.input, declared.inputs),
            (proto.graph.output, declared.outputs),
        ):
            assert [(v.name, shape(v)) for v in values] == [
                (t.name, t.at(batch, length, rows, "N")) for t in tensors
            ]
            kinds = [
                onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in values
            ]
            assert [kind.name for kind in kinds] == [t.dtype for t in tensors]


def test_files_have_lengths_that_manifest_states(exported):
    for role, model in exported.models.items():
        lengths = {
            "decoder": (None, "chosen_logits"),
            "step": (1, "with_logits"),
            "catchup": (2, "with_logits"),
            "verify": (5, "with_logits"),
            "prefill": (64, "caches_alone"),
        }
        wanted = {(name, ops): found for name, found in lengths.items() for ops in model.parity}
        if "gqa" in model.parity:
            wanted["batched", "gqa"] = None, "batched"
        for ops in filter(model.supports_gpu, model.parity):
            wanted["scored", ops] = None, "best_logits"
            if role == "draft":
                wanted["unrolled", ops] = None, "drafted"
                wanted["sampled", ops] = None, "drawn"
        assert {(g.name, g.ops): (g.length, g.signature) for g in model.graphs} == wanted
        assert model.capacity >= model.context_length + exported.num_draft_tokens + 2


def test_weights_are_stored_once_in_their_original_type(pairs, exported):
    for role, model in exported.models.items():
        parameters = model.num_parameters * {"float32": 4, "int8": 1}.get(model.weights_dtype, 2)
        size = exported.files[model.weights].size
        tables = 2 * 2 * model.context_length * 64
        assert 0.95 * parameters < size < 1.02 * parameters + tables, role


@pytest.mark.slow
def test_embedding_rows_are_cast_after_lookup(pairs):
    """A cast of the whole table would add a float32 copy to the packed matrix of the head."""
    bundle = pairs.bundle("bfloat16")
    for _, graph, _ in protos(bundle):
        forms = [form for one in weights_of(bundle, graph.file) for form in one.forms]
        assert any("Gather" in readers for steps, readers in forms if not steps)
        assert not any("Gather" in readers for steps, readers in forms if steps)


def test_graph_files_are_small_and_reference_external_weights(exported):
    for model, graph, proto in protos(exported):
        layer = 20_000 if model.quantization else 12_000
        steps = exported.num_draft_tokens if graph.name in ONE_CALL else 1
        assert exported.files[graph.file].size < steps * (20_000 + layer * len(model.layers))
        places = [{e.key: e.value for e in t.external_data} for t in proto.graph.initializer]
        assert {p["location"] for p in places if p} == {"weights.bin"}
        assert not any(int(p["offset"]) % 64 for p in places if p)


@pytest.mark.slow(exhaustive=True)
def test_export_is_reproducible(pairs, tmp_path, monkeypatch):
    _, target = pairs.checkpoint("gpt2")
    monkeypatch.setattr(tracer, "translate", traces.TRANSLATED)  # each is traced anew
    found = []
    for name in ("one", "other"):
        found.append(export("self:1", target, tmp_path / name, max_length=32))
    assert found[0] == found[1]
    assert found[0].to_json() == found[1].to_json()
    assert Bundle.read(tmp_path / "other").files == found[0].files


def test_forbidden_node_is_refused(pairs):
    import onnx_ir as ir

    model = ir.load(pairs.bundle("gpt2").path("target/decoder.onnx"))
    node = ir.node("Shape", [model.graph.inputs[0]])
    model.graph.append(node)
    with pytest.raises(graphs.ExportError, match="Shape"):
        graphs.check_devices(model)
