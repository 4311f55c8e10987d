"""Texts of the embedded pair under twenty JSON schemas."""

import json

import jsonschema
import pytest

from schemas import PLAIN, SCHEMAS


@pytest.mark.parametrize(
    "seeds",
    [range(1), pytest.param(range(1, 50), marks=pytest.mark.slow(exhaustive=True))],
    ids=["1 seed", "49 seeds"],
)
def test_schema_output_is_valid_or_reports_truncation(pipeline, seeds):
    reasons = []
    for schema in SCHEMAS:
        for seed in seeds:
            made = pipeline.generate("data = ", 80, 1.0, json_schema=schema, seed=seed)
            reasons.append(made.finish_reason)
            if made.finish_reason == "end":
                jsonschema.validate(json.loads(made.text), schema)
            else:
                assert (made.finish_reason, len(made.tokens)) == ("length", 80)
    assert reasons.count("end") > len(reasons) / 2


@pytest.mark.parametrize("schema", SCHEMAS[::4], ids=map(str, range(0, len(SCHEMAS), 4)))
def test_greedy_text_under_a_schema_equals_plain_masked_decoding(pipeline, schema):
    options = {"max_new_tokens": 40, "json_schema": schema}
    plain = pipeline.generate("data = ", num_draft_tokens=0, **options)
    for k in (5, "auto"):
        assert pipeline.generate("data = ", num_draft_tokens=k, **options).tokens == plain.tokens


def test_most_greedy_texts_end_with_whitespace_allowed(pipeline):
    made = [pipeline.generate("data = ", 120, json_schema=schema) for schema in PLAIN]
    ended = [
        (one.text, schema)
        for one, schema in zip(made, PLAIN, strict=True)
        if one.finish_reason == "end"
    ]
    assert len(ended) >= 17
    for text, schema in ended:
        jsonschema.validate(json.loads(text), schema)
