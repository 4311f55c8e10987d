"""Predicted duration of a quantized export."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from comparing import model_of, traced
from specedge.exporter.quantization import prediction
from specedge.exporter.quantization.texts import Texts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    runner = traced(model_of("llama"), tmp_path_factory.mktemp("llama"))
    return Mock(ops=["onnx"], decoder=lambda ops: Path(runner.path("decoder")))


def test_time_grows_with_texts_and_with_gptq(model, monkeypatch):
    monkeypatch.setattr(prediction, "_operations_a_second", lambda: 1e9)
    short, long = (Texts("", [np.zeros(n)], [np.zeros(n)]) for n in (10, 1000))
    nearest, gptq = (prediction.seconds(model, short, way) for way in ("nearest", "gptq"))
    assert 0 < nearest < gptq
    assert prediction.seconds(model, long, "nearest") == pytest.approx(100 * nearest)
