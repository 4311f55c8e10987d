"""Models with numerical problems that users of other exporters reported."""

from __future__ import annotations

import onnxruntime
import pytest

import realistic
import specedge
from architectures import ARCHITECTURES, WINDOW
from checkpoints import VOCAB_SIZE, greedy_tokens, make_model, make_tokenizer, save
from specedge.exporter import export


@pytest.mark.slow
def test_report_includes_quantization_error_of_massive_activations(tmp_path, monkeypatch):
    """At accuracy level 4 near-ties flip; without packed weights inputs stay in float32."""

    class FloatProducts(onnxruntime.SessionOptions):
        def __init__(self):
            super().__init__()
            self.add_session_config_entry("session.disable_prepacking", "1")

    model = realistic.make_model("qwen3", vocab=VOCAB_SIZE, context=96)
    target = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "target")

    def report(name):
        bundle = export(None, target, tmp_path / name, precision="int4", ops="all")
        return next(iter(bundle.target.quantization.values()))

    rounded = report("rounded")
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", FloatProducts)
        exact = report("exact")
    assert rounded.divergence != exact.divergence


@pytest.mark.slow
def test_window_has_the_same_edge_in_each_graph_variant(tmp_path):
    """A release of ONNX Runtime changed `local_window_size` of GroupQueryAttention by one token."""
    model = make_model(ARCHITECTURES["gemma3_text"][1]())
    target = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "target")
    bundle = export(None, target, tmp_path / "bundle", ops="all")
    assert {"onnx", "gqa"} <= bundle.target.parity.keys()
    prompts = [[*range(1, length + 1)] for length in (WINDOW - 1, WINDOW, WINDOW + 1)]
    expected = [greedy_tokens(model, prompt, 12) for prompt in prompts]
    for variant in ("onnx", "gqa"):
        with specedge.load(bundle.folder, ops=variant) as pipeline:
            for drafts in ({"num_draft_tokens": 0}, {"num_draft_tokens": 8, "drafter": "random"}):
                options = {"max_new_tokens": 12, "ignore_eos": True, **drafts}
                assert [pipeline.generate(prompt, **options).tokens for prompt in prompts] == (
                    expected
                )
