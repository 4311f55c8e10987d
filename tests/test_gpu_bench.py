"""What tools/gpu_bench.py makes of its measurements, and that it measures no other device."""

import click
import pytest

pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
pytest.importorskip("onnx", reason="needs the export extra")

import onnxruntime

from gpu_bandwidth import bandwidth, measured
from gpu_measuring import K, predicted
from specedge.theory.formulas import alpha_from_tokens, speedup


def found(call):
    """Figures of a target whose pass takes 10 ms, and of a draft whose pass takes 2."""

    def took(milliseconds):
        return {"captured": {"median": milliseconds}}

    return {
        "target": {"passes": {"1": took(10.0), str(K + 1): took(12.0)}},
        "draft": {"passes": {"1": took(2.0)}, "call": call},
        "requests": {"tokens_per_round": 3.0},
    }


@pytest.mark.parametrize(("call", "cost"), [(None, 0.2), ({"median": 4.0}, 0.1)])
def test_a_prediction_charges_what_rounds_do_passes_or_one_call(call, cost):
    assert predicted(found(call)) == speedup(alpha_from_tokens(3.0, K), K, cost, 1.2)


def test_the_bandwidth_is_of_the_device_that_was_asked_for_or_an_error():
    assert measured("cpu", 1 << 16) > 0
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("there may be a GPU")
    with pytest.raises(click.ClickException, match="the bandwidth of cuda:1: "):
        bandwidth("cuda:1")
