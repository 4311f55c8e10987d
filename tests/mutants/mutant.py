"""A mutant, and the files and tests that several name."""

from __future__ import annotations

from dataclasses import dataclass

VERIFY = "runtime/decoding/verify.py"
PROBABILITIES = "runtime/sampling/probabilities.py"
TOP_K_P = "runtime/sampling/top_k_p.py"
LOGIT_EDITS = "runtime/sampling/logit_edits.py"
DISTRIBUTION = "runtime/sampling/distribution.py"
MODEL = "runtime/decoding/model.py"
RUN = "runtime/requests/run.py"
DECODING = "runtime/decoding/decoding.py"
COUPLING = "runtime/decoding/coupling.py"
DRAFTERS = "runtime/drafters/draft_model.py"
LOOKUP = "runtime/drafters/prompt_lookup.py"
ASSEMBLER = "runtime/text/assembler.py"
TEXT = "runtime/text/detokenizer.py"
LOGPROBS = "runtime/sampling/logprobs.py"
NEAR_TIES = "runtime/exactness/near_ties.py"

RULE = (
    "tests/runtime/decoding/test_verify.py"
    "::test_the_accept_rule_gives_the_targets_distribution_for_any_draft"
)
JOINT = (
    "tests/runtime/decoding/test_decoding.py"
    "::test_every_string_has_exactly_the_targets_joint_probability"
)


GREEDY = "tests/runtime/decoding/test_decoding.py::test_greedy_output_equals_the_target_alone"
FIRST_PASS = (
    "tests/runtime/decoding/test_first_passes.py"
    "::test_a_k_leaves_other_bits_nowhere_that_another_k_does_not"
)


@dataclass(frozen=True)
class Mutant:
    """In `file`, `old`, which is there once, becomes `new`; the test `killer` must fail then.

    `seen` says where the mistake was made, if it is known from a paper, a post or other code.
    """

    name: str
    mistake: str
    seen: str
    file: str
    old: str
    new: str
    killer: str
