"""The predicted duration of an export."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from comparing import model_of, traced
from specedge.exporter.quantization import calibration
from specedge.exporter.quantization.texts import CalibrationTexts


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return traced(model_of("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(runner):
    return Mock(ops=["onnx"], decoder=lambda ops: Path(runner.path("decoder")))


def test_predicted_time_grows_with_texts_and_gptq(model, monkeypatch):
    monkeypatch.setattr(calibration, "_measure_speed", lambda: 1e9)
    short, long = (CalibrationTexts("", [np.zeros(n)], [np.zeros(n)]) for n in (10, 1000))
    nearest, gptq = (calibration.predict_seconds(model, short, way) for way in ("nearest", "gptq"))
    assert 0 < nearest < gptq
    assert calibration.predict_seconds(model, long, "nearest") == pytest.approx(100 * nearest)
