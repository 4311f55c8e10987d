"""Automatic draft precision: the fastest one with comparable acceptance rates."""

from pathlib import Path

import numpy as np
import pytest

import specedge
from quantized import PROMPTS, Made
from specedge.exporter.quantization import draft_precision
from specedge.exporter.quantization.draft_precision import DraftCandidate


def candidate(precision, sampled, greedy, seconds):
    return DraftCandidate(precision, Path(precision), None, None, sampled, greedy, seconds)


@pytest.mark.parametrize(
    ("int4", "int8", "best"),
    [
        ((0.80, 0.70, 0.3), (0.79, 0.70, 0.5), "int4"),
        ((0.71, 0.70, 0.3), (0.79, 0.70, 0.5), "int8"),
        ((0.80, 0.60, 0.3), (0.79, 0.70, 0.5), "int8"),
        ((0.10, 0.10, 0.3), (0.10, 0.10, 0.5), "fp32"),
        ((0.80, 0.70, 1.3), (0.79, 0.70, 1.1), "fp32"),
    ],
)
def test_fastest_precision_with_90_percent_acceptance_is_selected(int4, int8, best):
    found = [candidate("fp32", 0.8, 0.7, 1.0), candidate("int4", *int4), candidate("int8", *int8)]
    assert draft_precision._select(found).precision == best


@pytest.mark.slow
def test_draft_precision_is_selected_and_other_candidates_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_precision, "MIN_PARAMETERS", 0)

    def timed(found):
        for one, seconds in zip(found, (3.0, 2.0, 1.0), strict=True):
            one.seconds = seconds

    monkeypatch.setattr(draft_precision, "_measure_times", timed)
    made = Made(tmp_path, "llama", ops="onnx")
    assert made.bundle.draft.weights_dtype == "int8"
    (said,) = (note for note in made.progress.notes if note.startswith("draft: int8 ("))
    assert "0.33 times the pass time" in said
    assert {path.name for path in made.bundle.folder.iterdir() if path.is_dir()} == {
        "draft",
        "target",
    }
    plain = made.pipeline.generate(PROMPTS[0], 40, num_draft_tokens=0, ignore_eos=True)
    found = made.pipeline.generate(PROMPTS[0], 40, num_draft_tokens=4, ignore_eos=True)
    assert found.tokens == plain.tokens
    assert found.stats.num_accepted > 20  # the target's own weights


@pytest.mark.slow
def test_candidates_have_measured_times_and_acceptance_rates(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_precision, "MIN_PARAMETERS", 0)
    monkeypatch.setattr(draft_precision, "MAX_SECONDS", 0.0)
    seen = []
    monkeypatch.setattr(draft_precision, "_select", lambda found: seen.extend(found) or found[0])
    made = Made(tmp_path, "gpt2", ops="onnx", precision="fp32")
    assert made.bundle.draft.weights_dtype == made.bundle.target.weights_dtype == "float32"
    assert [one.precision for one in seen] == ["fp32", "int4", "int8"]
    assert seen[0].sampled == pytest.approx(1, abs=1e-5)
    assert seen[0].greedy == 1
    assert 0.5 < seen[1].sampled < seen[2].sampled < 1
    assert all(0 < one.seconds < np.inf for one in seen)
    assert specedge.load(made.bundle.folder).generate("a", 4).tokens
