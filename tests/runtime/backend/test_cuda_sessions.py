"""Options of ONNX Runtime's CUDA provider."""

from types import SimpleNamespace

import pytest

from specedge.runtime.backend.cuda import sessions


@pytest.mark.parametrize(
    ("version", "is_strict"), [("1.23.2", True), ("1.26.0", True), ("1.27.0", False)]
)
def test_norms_accumulate_in_float32_in_each_version(version, is_strict, monkeypatch):
    monkeypatch.setattr(sessions, "onnxruntime", lambda: SimpleNamespace(__version__=version))
    options = sessions._provider_options()
    assert (options.get("enable_skip_layer_norm_strict_mode") == "1") is is_strict
