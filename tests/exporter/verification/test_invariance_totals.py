"""Batch invariance at an export is tested at totals of all residues, early and late."""

import numpy as np
import pytest

from specedge.exporter.verification import checks
from specedge.exporter.verification.subgraph import SubgraphSession

LENGTHS = (2, 3, 5, 9, 18)


@pytest.fixture
def runner(traced_model):
    return traced_model("gpt2", "gqa")[1]


def invariant(runner):
    found = dict.fromkeys(checks.compared_lengths(runner), True)
    runner.run(checks.invariance_actions(runner, np.arange(300) % 500, found))
    return {length for length, is_invariant in found.items() if is_invariant}


def plant(monkeypatch, is_faulty):
    """Round the last row's logits differently in passes of several tokens with such totals."""
    run = SubgraphSession.run

    def faulty(session, file, packed, values):
        outputs = run(session, file, packed, values)
        length, past = values["input_ids"].shape[1], int(values["past_length"][0])
        if 1 < length <= 18 and is_faulty(past + length) and "logits" in outputs:
            logits = outputs["logits"].copy()
            logits[0, -1] = np.nextafter(logits[0, -1], np.float32(np.inf))
            outputs |= {"logits": logits}
        return outputs

    monkeypatch.setattr(SubgraphSession, "run", faulty)


def test_invariant_model_passes_at_all_totals(runner):
    assert invariant(runner) >= {1, *LENGTHS}


@pytest.mark.parametrize("residue", range(8))
def test_dependence_on_a_residue_of_the_total_is_detected(runner, monkeypatch, residue):
    plant(monkeypatch, lambda total: total % 8 == residue)
    assert not invariant(runner) & {*LENGTHS}


def test_dependence_at_the_end_of_the_context_is_detected(runner, monkeypatch):
    context = runner.geometry.context_length
    plant(monkeypatch, lambda total: total == context)
    assert not invariant(runner) & {*LENGTHS}
