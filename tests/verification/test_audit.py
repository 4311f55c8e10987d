"""The audit's checks of the loop: they pass what is right and catch what is planted."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the audit needs SciPy")

import auditing
from auditing import CONTEXT, VOCAB_SIZE, CachedTable, Ticks, make_audited_pair
from specedge.runtime.decoding import verification
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.decoding.verification import draw, verify
from specedge.runtime.sampling.logits import Logits
from specedge.sampling_options import Sampling
from specedge.verification import (
    audit,
    decoding_checks,
    joint_distribution,
    sampled_text,
)
from specedge.verification.audited_pair import AuditedPair, DecoderParts
from specedge.verification.defects import DEFECTS
from specedge.verification.memoization import MemoizedModel
from specedge.verification.report import FAILED, PASSED, SHORT, AuditReport, CheckResult

SETTINGS = {"plain": Sampling(1.0), "top-k": Sampling(0.7, top_k=4)}
ALPHA = 1e-8
DETERMINISTIC = (
    decoding_checks.caches,
    decoding_checks.self_draft,
    decoding_checks.greedy,
    decoding_checks.coupled,
)
EVERY_DRAFT = pytest.mark.parametrize("reads_hidden", [False, True], ids=["draft model", "head"])
BY_NAME = {defect.name: defect for defect in DEFECTS}


def run_sampled(parts=None, texts=30, **options):
    pair = make_audited_pair(parts, **options)
    return sampled_text.sampled(pair, Ticks(2 * texts).budget, SETTINGS, ALPHA)


def run_joint(parts=None, texts=700, **options):
    pair = make_audited_pair(parts, **options)
    return joint_distribution.joint(pair, Ticks(2 * texts).budget, SETTINGS, ALPHA)


@EVERY_DRAFT
def test_all_decoding_checks_pass_a_correct_pair(reads_hidden):
    pair = make_audited_pair(reads_hidden=reads_hidden)
    for check in DETERMINISTIC:
        assert check(pair, Ticks(10**6).budget).status == PASSED, check
    assert run_sampled(texts=20, reads_hidden=reads_hidden).status == PASSED
    assert run_joint(reads_hidden=reads_hidden).status == PASSED


def test_checks_expect_acceptance_of_drafts_in_one_pass(monkeypatch):
    """The draft is the target, but draws a round's tokens from the text and mask tokens alone."""
    monkeypatch.setattr(auditing, "DISTRIBUTIONS", [auditing.DISTRIBUTIONS[0]] * 2)
    for run in (run_sampled, run_joint):
        assert run(mask_token=VOCAB_SIZE).status == PASSED
    monkeypatch.setattr(AuditedPair, "depends_on_rounds", False)
    for run in (run_sampled, run_joint):
        assert run(mask_token=VOCAB_SIZE).status == FAILED


def test_texts_of_several_settings_are_independent():
    """With the same seeds for all settings, all together would pass for more than it is."""
    seeds = []
    one = sampled_text._draw

    def noted(pair, sampling, prompt, seed, k, length):
        seeds.append(seed)
        return one(pair, sampling, prompt, seed, k, length)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled_text, "_draw", noted)
        run_sampled(texts=20)
    assert len(seeds) == len(set(seeds)) >= 20


@EVERY_DRAFT
@pytest.mark.parametrize(
    "check", [decoding_checks.caches, decoding_checks.greedy, decoding_checks.coupled]
)
def test_a_cache_row_off_by_one_fails_deterministically(check, reads_hidden):
    pair = make_audited_pair(BY_NAME["cache row off by one"].parts, reads_hidden=reads_hidden)
    assert check(pair, Ticks(10**6).budget).status == FAILED


def test_sampled_check_detects_a_head_that_draws_from_another_distribution(monkeypatch):
    """Its draft tokens are the likeliest ones."""

    def draw_largest(*arguments):
        _, distribution = draw(*arguments)
        return int(distribution.row(VOCAB_SIZE).argmax()), distribution

    monkeypatch.setattr(verification, "draw", draw_largest)
    assert run_sampled(reads_hidden=True).status == FAILED


def test_sampled_check_expects_acceptance_of_the_drafts_of_a_head(monkeypatch):
    """The head is almost sure of a token, and without the target's states of none."""

    def distribution(numbers):
        peak = 95 if numbers[0] else 1
        return np.array([peak, 1, 1, 1, 1, 1]) / (peak + 5)

    monkeypatch.setattr(auditing, "DISTRIBUTIONS", [auditing.DISTRIBUTIONS[0], distribution])
    assert run_sampled(texts=20, reads_hidden=True).status == PASSED
    monkeypatch.setattr(AuditedPair, "depends_on_rounds", False)
    assert run_sampled(texts=20, reads_hidden=True).status == FAILED


@pytest.mark.parametrize("run", [run_sampled, run_joint])
def test_statistical_checks_detect_a_wrong_residual_of_a_head(run):
    assert run(BY_NAME["residual"].parts, reads_hidden=True).status == FAILED


def test_self_draft_check_detects_stale_draft_cache():
    """A draft that loses a row after full acceptances changes no distribution: only this check sees
    it.
    """

    class Behind(Drafter):
        name = "behind"

        def __init__(self, drafter):
            self.drafter = drafter

        def propose(self, history, *rest):
            model = self.drafter.model
            if model.length == len(history.tokens) - 2:  # after a full acceptance
                model.prefill([0])
            return self.drafter.propose(history, *rest)

        def truncate(self, length):
            self.drafter.truncate(length)

    parts = DecoderParts(drafter=Behind)
    found = decoding_checks.self_draft(make_audited_pair(parts), Ticks(10**6).budget)
    assert found.status == FAILED
    assert "rejected" in found.summary
    assert run_joint(parts).status == PASSED


class Flipped:
    """A target whose two likeliest logits change places in passes of more than one row."""

    def __init__(self, model, margin):
        self._model, self._margin = model, margin

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, tokens, num_rows=None):
        logits = self._model.forward(tokens, num_rows).array()
        if len(tokens) > 1:
            for row in logits:
                second, first = np.argsort(row)[-2:]
                if row[first] - row[second] < self._margin:
                    row[first], row[second] = row[second], row[first]
        return Logits(logits)


@EVERY_DRAFT
@pytest.mark.parametrize(("noise", "status"), [(0.0, FAILED), (0.006, PASSED)])
def test_greedy_check_tolerates_and_lists_only_near_ties(noise, status, reads_hidden):
    parts = DecoderParts(target=lambda model: Flipped(model, 0.01))
    pair = make_audited_pair(parts, num_prompts=4, reads_hidden=reads_hidden)
    pair.noise["target"] = noise
    found = decoding_checks.greedy(pair, Ticks(10**6).budget)
    assert found.status == status
    assert bool(found.figures["near_ties"]) == (noise > 0)
    assert bool(found.figures["differences"]) == (noise == 0)


@pytest.mark.parametrize(("noise", "status"), [(0.0, FAILED), (1.0, PASSED)])
def test_coupled_text_depends_only_on_seed_without_logit_noise(noise, status):
    pair = make_audited_pair(DecoderParts(target=lambda model: Flipped(model, 1.0)), num_prompts=6)
    pair.noise["target"] = noise
    result = decoding_checks.coupled(pair, Ticks(10**6).budget)
    assert result.status == status
    assert result.figures["differences"]


class WrongBeyond:
    """Target that is wrong in passes of more than this many tokens."""

    def __init__(self, model, longest):
        self._model, self._longest = model, longest

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, tokens, num_rows=None):
        scores = self._model.forward(tokens, num_rows)
        return Logits(-scores.array()) if len(tokens) > self._longest else scores


@pytest.mark.parametrize(
    ("longest", "max_first_length", "status"), [(17, 1, PASSED), (17, 24, FAILED), (16, 1, FAILED)]
)
def test_greedy_check_covers_every_pass_length_of_a_request(longest, max_first_length, status):
    """The longest are of 16 draft tokens, as rounds are planned, and of the end of a prompt."""
    parts = DecoderParts(target=lambda model: WrongBeyond(model, longest))
    pair = make_audited_pair(parts, max_first_length=max_first_length)
    assert decoding_checks.greedy(pair, Ticks(10**6).budget).status == status


def test_greedy_check_starts_no_further_k_after_its_time_budget():
    """A long prompt would be read again for each."""
    found = decoding_checks.greedy(make_audited_pair(), Ticks(20).budget)
    assert found.status == SHORT
    assert found.figures["num_tokens_by_k"]["16"] == 0


def test_zero_probability_tokens_fail_the_audit():
    def stubborn(draft, scores, sampling, history, tests, last, is_block):
        verdict = verify(draft, scores, sampling, history, tests, last, is_block)
        wrong = int(scores[verdict.num_accepted].array().argmin())
        return dataclasses.replace(verdict, next_token=wrong) if last > 0.99 else verdict

    found = run_sampled(DecoderParts(stubborn))
    assert found.status == FAILED
    assert any("does not allow" in line for line in (found.summary, *found.details))


def self_tested(seconds, reads_hidden, **options):
    """Texts of `sampled` take far longer than the others, so they tick louder."""
    ticks = Ticks(seconds)

    def on_progress(check):
        ticks.step = seconds / 1000 if check.endswith("sampled") else 1.0

    pair = make_audited_pair(reads_hidden=reads_hidden)
    return audit.self_test(pair, ticks.budget, on_progress, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reads_hidden", "defects"),
    # With a head, `joint` drafts with the perturbed target, which the last defect affects less.
    [(False, DEFECTS), (True, DEFECTS[:-1])],
    ids=["draft model", "head"],
)
def test_self_test_detects_all_faults_without_false_alarms(reads_hidden, defects):
    result = self_tested(80000, reads_hidden, defects=defects)
    assert result.false_alarms == []
    assert [(defect.name, bool(checks)) for defect, checks in result.caught] == [
        (defect.name, True) for defect in defects
    ]
    assert result.num_caught == len(defects)


def test_too_little_time_is_incomplete():
    pair = make_audited_pair()
    statuses = [check(pair, Ticks(3).budget).status for check in DETERMINISTIC]
    assert SHORT in statuses
    assert FAILED not in statuses
    assert run_sampled(texts=2).status == SHORT
    assert run_joint(texts=20).status == SHORT


def test_memoized_model_returns_same_logits():
    table = make_audited_pair().target
    model, other = MemoizedModel(table), CachedTable(table.distribution, VOCAB_SIZE, CONTEXT)
    random = np.random.default_rng(0)
    for _ in range(60):
        text = [0, *random.integers(3, size=4)]
        kept = int(random.integers(1, 4))
        model.truncate(0)
        other.truncate(0)
        for one in (model, other):
            one.prefill(text[:kept])
        rows = [one.forward(text[kept:]).array() for one in (model, other)]
        assert np.array_equal(*rows)
    assert sum(table.passes) < 130  # of 60 texts with 1 to 4 rows; 3 + 9 + 27 + 81 differ


@pytest.mark.parametrize(
    ("seconds_left", "seconds"), [(40, 10), (100, 25), (240, 30), (600, 30), (6000, 300)]
)
def test_greedy_check_leaves_first_result_within_a_minute(seconds_left, seconds):
    share = audit._share("greedy", seconds_left)
    assert share * seconds_left == pytest.approx(seconds)


def test_json_has_no_infinities():
    finding = CheckResult("greedy", SHORT, "so", (), {"target": {"margin": float("inf"), "n": 1.5}})
    facts = AuditReport({}, (finding,), (), 1.0).as_dict()["findings"][0]["facts"]
    assert facts == {"target": {"margin": "inf", "n": 1.5}}


def test_a_report_passes_only_if_every_check_did():
    def report(*statuses):
        findings = tuple(CheckResult(f"check {i}", s, "so") for i, s in enumerate(statuses))
        return AuditReport({"bundle": "here"}, findings, ("sure",), 1.0)

    assert report(PASSED, PASSED).result == "PASSED"
    assert report(PASSED, SHORT).result == "INCOMPLETE"
    assert "too little time for check 1" in report(PASSED, SHORT).text()
    assert report(SHORT, FAILED).result == "FAILED"
    assert "FAILED (check 1)" in report(PASSED, FAILED).text()
    assert report(FAILED).as_dict()["findings"][0]["status"] == FAILED
