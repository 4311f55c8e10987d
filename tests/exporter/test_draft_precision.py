"""Default precision of a draft model, by the target's precision and the checkpoints."""

from types import SimpleNamespace

import pytest

from specedge.exporter import bundle_export
from specedge.exporter.request import ExportRequest

FLOAT, QUANTIZED = SimpleNamespace(is_quantized=False), SimpleNamespace(is_quantized=True)


def resolved(draft, target=FLOAT, **options):
    draft.role, draft.name = "draft", "x"
    target = SimpleNamespace(**vars(target) | {"role": "target", "name": "y"})
    models = bundle_export._Models(target, draft)
    request = ExportRequest("x", "y", "z", **options)
    return bundle_export._resolve(request, models).precision_of("draft")


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("int8", "int8"), ("int4", "int8"), ("int8-block", "int8-block"),
        ("fp32", "fp32"), ("fp16", "fp16"), (None, "fp32"),
    ],
)  # fmt: skip
def test_draft_of_a_float_checkpoint_has_a_precision_that_is_fast(precision, expected):
    assert resolved(FLOAT, precision=precision) == expected


@pytest.mark.parametrize(("draft", "expected"), [(QUANTIZED, "keep"), (FLOAT, "int8")])
def test_draft_beside_a_quantized_target_keeps_quantized_weights(draft, expected):
    assert resolved(draft, QUANTIZED) == expected


def test_requested_precision_and_compute_type_take_precedence():
    assert resolved(FLOAT, precision="int8", draft_precision="int4") == "int4"
    assert resolved(FLOAT, precision="int4", compute="fp16") == "int4"
