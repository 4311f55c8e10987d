"""A pair of table models and a deterministic clock for tests of the audit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from fakes import HeadTable, StatesTable, hashed_distribution, of_rows
from specedge.verification import audit
from specedge.verification.audited_pair import AuditedPair, AuditPrompt, DecoderParts
from specedge.verification.budget import Budget, Clock
from specedge.verification.report import PASSED, SKIPPED

VOCAB_SIZE = 6
CONTEXT = 96


class CachedTable(StatesTable):
    """Table model whose only cache buffer stores its input tokens."""

    def cache_rows(self, start, end):
        return [np.array(self.rows[start:end], float)[None, :, None]]

    def with_new_cache(self):
        return CachedTable(self.distribution, self.vocab_size, self.context_length)


class CachedHead(HeadTable):
    """Draft head whose only cache buffer stores its states and tokens; states default to zeros."""

    def cache_rows(self, start, end):
        return [np.array(self.rows[start:end], float)[None]]

    def forward(self, tokens, num_rows=None, hidden=None):
        return super().forward(tokens, num_rows, self._states(tokens, hidden))

    def prefill(self, tokens, hidden=None):
        super().prefill(tokens, self._states(tokens, hidden))

    @staticmethod
    def _states(tokens, hidden):
        return np.zeros((len(tokens), 1)) if hidden is None else hidden


DISTRIBUTIONS = [hashed_distribution(seed, VOCAB_SIZE, 0.7) for seed in (1, 2)]


def make_audited_pair(
    parts=None, num_prompts=3, max_first_length=1, mask_token=None, reads_hidden=False
):
    num_inputs = VOCAB_SIZE if mask_token is None else mask_token + 1
    target, draft = (
        CachedTable(distribution, num_inputs, CONTEXT + 8) for distribution in DISTRIBUTIONS
    )
    if reads_hidden:
        draft = CachedHead(of_rows(DISTRIBUTIONS[1]))
    by_role = {
        role: SimpleNamespace(
            vocab_size=VOCAB_SIZE, context_length=CONTEXT, num_experts=0, encoder=None,
            acceptance=None, mask_token=None, reads_hidden=False,
        )
        for role in ("target", "draft")
    }  # fmt: skip
    by_role["draft"].mask_token, by_role["draft"].reads_hidden = mask_token, reads_hidden
    prompts = [AuditPrompt(f"prompt {i}", (i % 6, 1, i // 6, 2)) for i in range(num_prompts)]
    return AuditedPair(
        target, draft, by_role, 3, 1e-6, prompts, max_first_length, parts or DecoderParts()
    )


class Ticks:
    """A clock that goes on by `step` seconds whenever it is asked, and a budget by it."""

    def __init__(self, seconds, step=1.0):
        self.step, self.now = step, 0.0
        self.budget = Budget(seconds, Clock(self._tick))

    def _tick(self):
        self.now += self.step
        return self.now


def passed_checks(bundle):
    """Audit a bundle; return its findings by check, all of which must pass or not apply."""
    ticks = Ticks(12000)

    def on_progress(check):
        ticks.step = {"greedy": 0.5, "sampled": 40.0}.get(check, 1.0)

    prompts = ["def parse(self):", "import json\n", "    return ["]
    report = audit.audit(bundle, audit.ExecutionSettings(), prompts, ticks.budget, on_progress)
    findings = {finding.check: finding for finding in report.findings if finding.status != SKIPPED}
    statuses = {check: finding.status for check, finding in findings.items()}
    assert statuses == dict.fromkeys(statuses, PASSED)
    return findings


def check_power(findings):
    """Assert that larger total variation distances of sampled text would have been detected."""
    sampled = findings["sampled"].figures["all together"]
    assert max(sampled[test]["would_catch"] for test in ("by_rank", "by_lean")) < 0.1
    strings = [x["strings"] for x in findings["joint"].figures.values() if "strings" in x]
    assert max(test["would_catch"] for test in strings) < 0.25
