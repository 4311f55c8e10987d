"""Batched graphs equal the decoder, or are refused."""

import shutil
from dataclasses import replace

import onnx_ir as ir
import onnxruntime
import pytest

import published
import specedge
from cases import exhaustive, slow
from checkpoints import make_tokenizer
from quantized import PROMPTS, Made
from specedge.bundle.batched_signature import BATCHED
from specedge.bundle.manifest import PREFILL_LENGTH
from specedge.errors import ParityError
from specedge.exporter import Progress, export
from specedge.exporter.graph import batched
from specedge.exporter.graph.nodes import GqaInput
from specedge.exporter.verification import runner
from specedge.exporter.verification.batched_graphs import add_batched_graphs, measure_error
from specedge.runtime.backend.batched_self_test import share_passes
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device


def has_batched(model):
    return {graph.ops for graph in model.graphs if graph.name == BATCHED}


def check(bundle, model, ops):
    """Assert that the graph is right, and exact on this machine."""
    assert measure_error(model, bundle.folder, ops) < (1e-3 if ops == "gqa-kv16" else 1e-5)
    first = OrtModel(bundle, model, Device(), ops)
    models, note = share_passes(bundle, model, Device(), [first, first.with_new_cache()])
    assert note is None
    assert models[0].batch.max_rows > PREFILL_LENGTH


@pytest.mark.parametrize(
    "name", ["gpt2", slow("bfloat16"), *map(exhaustive, ("llama", "qwen2", "mistral", "windowed"))]
)
def test_batched_graphs_of_both_models_equal_the_decoder(pairs, name):
    bundle = pairs.bundle(name)
    for model in bundle.models.values():
        assert has_batched(model) == {"gqa"} & model.parity.keys()
        for ops in has_batched(model):
            check(bundle, model, ops)


@pytest.mark.parametrize(
    ("name", "is_batched"),
    [
        slow("Qwen3-0.6B", True),
        *(
            exhaustive(name, True)
            for name in ("gemma-2-2b", "gemma-3-1b", "phi-2", "pythia-160m", "opt-125m")
        ),
        exhaustive("Qwen3-30B-A3B", True),
        exhaustive("gpt-oss-20b", True),
        exhaustive("bloom-560m", False),
    ],
)
def test_published_families_have_batched_graphs_unless_attention_has_a_bias(
    name, is_batched, tmp_path
):
    model = published.build(name, tmp_path / "target")
    tokenizer = make_tokenizer(tmp_path / "target")
    published.save(name, model, tokenizer, tmp_path / "target")
    bundle = export(
        None, tmp_path / "target", tmp_path / "bundle",
        ops="gqa", precision="fp32", cache="fp16", max_length=128,
    )  # fmt: skip
    assert has_batched(bundle.target) == ({"gqa", "gqa-kv16"} if is_batched else set())
    for ops in has_batched(bundle.target):
        check(bundle, bundle.target, ops)


@pytest.mark.parametrize("precision", [slow("int8-block"), *map(exhaustive, ("int8", "int4"))])
def test_quantized_models_share_passes(precision, tmp_path):
    bundle = Made(tmp_path, "llama", draft="self:1", precision=precision, ops="gqa").bundle
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    with specedge.load(bundle.folder) as pipeline:
        alone = pipeline.generate_batch(PROMPTS, **options)
    with specedge.load(bundle.folder, slots=3) as pipeline:
        assert pipeline.target.batch.max_rows > PREFILL_LENGTH
        together = pipeline.generate_batch(PROMPTS, **options)
    assert [x.tokens for x in together] == [x.tokens for x in alone]


@pytest.fixture
def plain(pairs, tmp_path):
    """The entry of a model without batched graphs, and a copy of its bundle's folder."""
    bundle = pairs.bundle("gpt2")
    graphs = tuple(graph for graph in bundle.target.graphs if graph.name != BATCHED)
    folder = shutil.copytree(bundle.folder, tmp_path / "copy")
    return replace(bundle.target, graphs=graphs), folder


def exchange_rows(graph):
    """Take each token's attention from another row."""
    for node in graph:
        if node.op_type == "Gather" and node.inputs[1].name == "packed_rows":
            node.replace_input_with(1, next(x for x in graph.inputs if x.name == "logits_rows"))


def narrow_window(graph):
    for node in graph:
        if node.op_type == "GroupQueryAttention":
            node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", 2)


def shift_positions(graph):
    for node in graph:
        if node.op_type == "GroupQueryAttention":
            query_lengths = node.inputs[GqaInput.QUERY_SEQLENS]
            node.replace_input_with(GqaInput.SEQLENS_K, query_lengths)


@pytest.mark.parametrize("whole_bytes", [runner.WHOLE_BYTES, 0])  # 0 partitions the graphs
@pytest.mark.parametrize("change", [exchange_rows, narrow_window, shift_positions])
def test_wrong_batched_graph_is_refused(plain, monkeypatch, change, whole_bytes):
    monkeypatch.setattr(runner, "WHOLE_BYTES", whole_bytes)
    batch = batched.batch

    def wrong(decoder):
        changed = batch(decoder)
        change(changed.graph)
        return changed

    monkeypatch.setattr(batched, "batch", wrong)
    with pytest.raises(ParityError, match=r"target \(gqa\): the batched graph differs"):
        add_batched_graphs("target", *plain, Progress())


def test_batched_graph_of_a_large_model_is_compared_in_parts(pairs, monkeypatch):
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    bundle = pairs.bundle("gpt2")
    assert measure_error(bundle.target, bundle.folder, "gqa") < 1e-5


def test_older_onnxruntime_writes_no_batched_graphs(plain, monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.2")
    progress = Progress()
    assert add_batched_graphs("target", *plain, progress) == plain[0]
    assert "1.32" in progress.notes[0]


def test_attention_with_a_bias_has_no_batched_graph(plain):
    model, folder = plain
    decoder = ir.load(folder / model.graph("decoder", "gqa").file)
    for node in decoder.graph:
        if node.op_type == "GroupQueryAttention":
            node.resize_inputs(GqaInput.ATTENTION_BIAS + 1)
            node.replace_input_with(GqaInput.ATTENTION_BIAS, node.inputs[0])
    assert batched.batch(decoder) is None
