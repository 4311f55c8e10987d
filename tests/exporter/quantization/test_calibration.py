"""Prompts that a model answers for calibration, and the predicted duration of an export."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from comparing import model_of, traced
from specedge.exporter.quantization import calibration
from specedge.exporter.quantization.texts import CalibrationTexts
from specedge.exporter.verification.runner import FillNoise, PassAction


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return traced(model_of("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(runner):
    return Mock(ops=["onnx"], decoder=lambda ops: Path(runner.path("decoder")))


def test_calibration_answers_are_greedy_model_output(runner):
    prompts = [np.array([3, 1, 4, 1, 5]), np.array([9, 2, 6])]
    answers = calibration.generate_answers(runner.path("decoder"), runner.geometry, prompts, ())
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == len(prompt) + calibration.ANSWER_TOKENS
        noise = FillNoise(0, runner.geometry.capacity)
        _, logits = runner.run([noise, PassAction("decoder", tokens, 0)])
        assert np.array_equal(logits[len(prompt) - 1 : -1].argmax(1), tokens[len(prompt) :])
    (first,) = calibration.generate_answers(
        runner.path("decoder"), runner.geometry, prompts[:1], answers[0][-3:]
    )
    assert len(first) <= len(answers[0])
    assert first[-1] in answers[0][-3:]


def test_predicted_time_grows_with_texts_and_gptq(model, monkeypatch):
    monkeypatch.setattr(calibration, "_measure_speed", lambda: 1e9)
    short, long = (CalibrationTexts("", [np.zeros(n)], [np.zeros(n)]) for n in (10, 1000))
    nearest, gptq = (calibration.predict_seconds(model, short, way) for way in ("nearest", "gptq"))
    assert 0 < nearest < gptq
    assert calibration.predict_seconds(model, long, "nearest") == pytest.approx(100 * nearest)
