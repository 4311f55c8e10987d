"""Default precision of a draft model, by the target's precision and the checkpoints."""

import pytest

from specedge.exporter.request import ExportRequest


def draft_precision(target_is_quantized=False, draft_is_quantized=False, **options):
    request = ExportRequest("x", "y", "z", **options)
    resolved = request.with_precisions(target_is_quantized, draft_is_quantized)
    return resolved.precision_of("draft")


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("int8", "int8"), ("int4", "int8"), ("int8-block", "int8-block"),
        ("fp32", "fp32"), ("fp16", "fp16"), (None, "fp32"),
    ],
)  # fmt: skip
def test_draft_beside_integer_target_is_int8_by_default(precision, expected):
    assert draft_precision(precision=precision) == expected


@pytest.mark.parametrize(("is_quantized", "expected"), [(True, "keep"), (False, "int8")])
def test_quantized_draft_beside_quantized_target_is_kept(is_quantized, expected):
    assert draft_precision(True, is_quantized) == expected


def test_requested_precision_and_compute_type_take_precedence():
    assert draft_precision(precision="int8", draft_precision="int4") == "int4"
    assert draft_precision(precision="int4", compute="fp16") == "int4"


def test_self_draft_has_the_precision_of_the_target():
    assert draft_precision(draft_is_quantized=None, precision="int4") == "int4"
