"""Acceptance rates that an export measures for the planner, in every precision."""

import json

import numpy as np
import onnxruntime as ort
import pytest

import specedge
from comparing import model_of, traced
from quantized import Made
from specedge.bundle import MANIFEST
from specedge.exporter.quantization import draft_acceptance
from specedge.exporter.quantization.draft_acceptance import acceptance_by_row, rates_by_confidence
from specedge.exporter.verification.runner import FillNoise, PassAction
from specedge.request import DrafterName

pytestmark = pytest.mark.usefixtures("own_costs")


def priors(pipeline):
    """The acceptance rates that requests assume, greedy and sampled."""
    table = pipeline.costs.table
    return [mode.acceptance.get(DrafterName.MODEL) for mode in (table.greedy, table.sampled)]


def test_an_export_stores_the_rates_that_requests_assume(tmp_path):
    """A draft with the target's weights is always accepted."""
    made = Made(tmp_path, "llama", ops="onnx", precision="fp32", draft_precision="fp32")
    rates = made.bundle.draft.acceptance
    assert rates.greedy == 1
    assert rates.sampled == pytest.approx(1, abs=1e-5)
    assert priors(made.pipeline) == [rates.greedy, rates.sampled]
    assert "draft: acceptance rate 100% greedy, 100% sampled" in " ".join(made.progress.notes)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int8", "draft_precision": "int4"},
        {"precision": "int8", "draft": "self:1"},
        {"precision": "fp32", "draft_vocab": 300},
        {"precision": "int4", "ops": None},
    ],
)
def test_every_draft_has_rates(tmp_path, options):
    rates = Made(tmp_path, "llama", **{"ops": "onnx"} | options).bundle.draft.acceptance
    assert 0 < rates.sampled <= 1
    assert 0 <= rates.greedy <= 1


def test_large_targets_answer_no_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_acceptance, "MAX_READ_BYTES", 0)
    monkeypatch.setattr(draft_acceptance, "generate_answers", None)
    made = Made(tmp_path, "llama", ops="onnx", precision="fp32", draft_precision="fp32")
    assert made.bundle.draft.acceptance.greedy == 1


def test_bundles_without_rates_keep_the_prior(tmp_path):
    made = Made(tmp_path, "llama", ops="onnx", precision="fp32", draft_precision="fp32")
    path = made.bundle.folder / MANIFEST
    manifest = json.loads(path.read_text("utf-8"))
    del manifest["models"]["draft"]["acceptance"]
    path.write_text(json.dumps(manifest), "utf-8")
    with specedge.load(made.bundle.folder) as pipeline:
        assert priors(pipeline) == [None, None]


def test_rates_of_a_row_are_those_of_its_distributions():
    draft = np.log([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]])
    target = np.log([[0.6, 0.3, 0.1], [0.1, 0.8, 0.1]])
    agree, sampled, confidence = acceptance_by_row(draft, target, None)
    assert agree.tolist() == [1, 0]
    assert sampled == pytest.approx([0.9, 0.45])
    assert confidence == pytest.approx([0.7, 0.5])


def test_rates_of_a_reduced_vocabulary_are_those_of_its_tokens():
    draft, target = np.log([[0.3, 0.7]]), np.log([[0.2, 0.3, 0.5]])
    agree, sampled, _ = acceptance_by_row(draft, target, [0, 2])
    assert agree.tolist() == [1]
    assert sampled == pytest.approx([0.7])


def test_answers_are_greedy_model_output(tmp_path):
    runner, options = traced(model_of("llama"), tmp_path), ort.SessionOptions()
    prompts = [np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6])]
    answers = draft_acceptance.generate_answers(
        runner.path("decoder"), runner.geometry, prompts, (), 48, options
    )
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == len(prompt) + 48
        noise = FillNoise(0, runner.geometry.capacity)
        _, logits = runner.run([noise, PassAction("decoder", tokens, 0)])
        assert np.array_equal(logits[len(prompt) - 1 : -1].argmax(1), tokens[len(prompt) :])
    (first,) = draft_acceptance.generate_answers(
        runner.path("decoder"), runner.geometry, prompts[:1], answers[0][-3:], 48, options
    )
    assert len(first) <= len(answers[0])
    assert first[-1] in answers[0][-3:]


def test_rates_by_confidence_are_means_of_classes_with_a_prior():
    """Classes without rows have the mean rate, shifted by their probability."""
    confidences = np.array([[0.1]] * 50 + [[0.9]] * 50)
    accepted = np.array([[0.2]] * 50 + [[0.8]] * 50)
    rates = rates_by_confidence(confidences, accepted)
    assert len(rates) == 7
    assert rates[0] == pytest.approx((50 * 0.2 + 4 * 0.1) / 54)
    assert rates[2] == pytest.approx(0.425)
    assert rates[5] == pytest.approx((50 * 0.8 + 4 * 0.9) / 54)
    assert list(rates) == sorted(rates)
    assert rates_by_confidence(np.ones((9, 1)), np.zeros((9, 1))) == (0.0,) * 7
    assert max(rates_by_confidence(np.full((9, 1), 0.1), np.ones((9, 1)))) == 1.0
