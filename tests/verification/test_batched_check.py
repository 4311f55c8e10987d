"""The batched check: requests that share passes, with and without an injected defect."""

from collections import defaultdict

import pytest

pytest.importorskip("scipy", reason="the audit needs SciPy")

from auditing import Ticks, make_audited_pair
from specedge.runtime.backend import memory
from specedge.runtime.backend.batched_model import OrtBatchedModel
from specedge.verification import audit
from specedge.verification.audited_pair import DecoderParts
from specedge.verification.batched_check import OPTIONS
from specedge.verification.defects import BATCHED_DEFECT
from specedge.verification.report import FAILED, PASSED, SHORT, SKIPPED


def make_check(bundle, **settings):
    prompts = audit.built_in_prompts(bundle)
    return audit.make_batched_check(bundle, audit.ExecutionSettings(**settings), prompts)


@pytest.fixture(scope="module")
def check(pipeline):
    return make_check(pipeline.bundle)


def test_requests_that_share_passes_pass(check, monkeypatch):
    lengths_by_model, forward = defaultdict(list), OrtBatchedModel.forward

    def record(self, feeds):
        lengths_by_model[self].append([len(tokens) for _, tokens, _ in feeds])
        return forward(self, feeds)

    monkeypatch.setattr(OrtBatchedModel, "forward", record)
    result = check.run(Ticks(1000).budget)
    assert result.status == PASSED
    assert result.figures["num_slots"] == 4
    assert result.figures["num_requests"] == 2 * len(OPTIONS)
    assert len(lengths_by_model) == 2  # target and draft model
    passes = [lengths for all_lengths in lengths_by_model.values() for lengths in all_lengths]
    assert any(len({*lengths}) > 1 for lengths in passes)  # ragged
    assert any(max(lengths) > 32 and min(lengths) < 8 for lengths in passes)  # beside a prompt


def test_rows_of_another_request_are_detected(check):
    result = audit.self_test(make_audited_pair(), Ticks(1000).budget, batched=check, defects=())
    assert result.false_alarms == []
    assert result.caught == [(BATCHED_DEFECT, ["batched"])]


class SwappedCaches:
    """Passes over several slots that read and write the caches of the first two exchanged."""

    def __init__(self, batch):
        self.max_rows, self.max_logits, self._batch = batch.max_rows, batch.max_logits, batch

    def forward(self, feeds):
        slots = self._batch._slot_of
        first, second = self._batch.caches[:2]
        slots[first], slots[second] = slots[second], slots[first]
        return self._batch.forward(feeds)


def test_exchanged_caches_are_detected(check):
    result = check.run(Ticks(1000).budget, DecoderParts(batch=SwappedCaches))
    assert result.status == FAILED
    assert "new token" in result.details[0]


def test_less_time_compares_fewer_requests(check):
    assert check.run(Ticks(0).budget).status == SHORT
    result = check.run(Ticks(2).budget)
    assert result.status == PASSED
    assert result.figures["num_requests"] == len(OPTIONS)


def test_requests_that_take_turns_are_not_compared(pipeline, monkeypatch):
    check = make_check(pipeline.bundle, ops="onnx")
    result = check.run(Ticks(1000).budget)
    assert result.status == SKIPPED
    assert "no batched graph for the graph variant 'onnx'" in result.summary
    result = audit.self_test(make_audited_pair(), Ticks(1000).budget, batched=check, defects=())
    assert result.results == []
    monkeypatch.setattr(memory, "available_bytes", lambda: 0)
    result = make_check(pipeline.bundle).run(Ticks(1000).budget)
    assert result.status == SKIPPED
    assert "memory" in result.summary


def test_checks_that_do_not_apply_leave_the_audit_passed():
    skipped = audit.CheckResult("batched", SKIPPED, "requests take turns")
    report = audit.AuditReport({}, (audit.CheckResult("files", PASSED, "fine"), skipped), (), 1.0)
    assert report.result == "PASSED"
