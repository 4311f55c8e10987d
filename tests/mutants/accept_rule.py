"""Mistakes in accepting and replacing draft tokens."""

from __future__ import annotations

from .mutant import JOINT, RULE, VERIFY, Mutant

ACCEPT_RULE = [
    Mutant(
        "resample-from-target",
        "the recovered token is drawn from t, not from max(0, t - d)",
        "",
        VERIFY,
        "(residual if residual.total else target).pick(last)",
        "target.pick(last)",
        RULE,
    ),
    Mutant(
        "accept-by-zero",
        "u d ≤ t instead of u d < t: a token that the target never gives passes at u = 0",
        "",
        VERIFY,
        "accepted = sampling.lenience * tests[i] * draft_prob < target.of(token)",
        "accepted = sampling.lenience * tests[i] * draft_prob <= target.of(token)",
        "tests/runtime/loop/test_verify.py"
        "::test_a_token_that_the_target_never_gives_is_not_accepted_even_by_zero",
    ),
    Mutant(
        "accept-on-nan",
        "min(1, t / d) with d = 0: 0 / 0 passes",
        "jaymody/speculative-sampling, toyllm",
        VERIFY,
        "accepted = sampling.lenience * tests[i] * draft_prob < target.of(token)",
        "accepted = not tests[i] >= min(1, np.float64(target.of(token)) / draft_prob)",
        "tests/runtime/loop/test_verify.py"
        "::test_a_token_without_probability_in_either_distribution_is_not_accepted",
    ),
    Mutant(
        "shared-uniform",
        "one random number for all positions of a round",
        "a blog's note; feifeibear/LLMSpeculativeSampling seeds inside its loop",
        VERIFY,
        "sampling.lenience * tests[i] * draft_prob",
        "sampling.lenience * tests[0] * draft_prob",
        JOINT,
    ),
    Mutant(
        "draft-distribution-of-another-row",
        "the ratio takes d of the draft position before",
        "",
        VERIFY,
        "drawn_from = draft.distribution(i)\n        draft_prob",
        "drawn_from = draft.distribution(i - 1)\n        draft_prob",
        JOINT,
    ),
    Mutant(
        "residual-of-another-row",
        "the residual takes d from another draft position's row",
        "",
        VERIFY,
        "draft.distribution(i)\n    if drawn_from is None",
        "draft.distribution(0)\n    if drawn_from is None",
        JOINT,
    ),
    Mutant(
        "bonus-from-row-k",
        "the bonus token is drawn from the target's row K, not K + 1",
        "",
        VERIFY,
        "target = of_row(scores[num_drafted], sampling",
        "target = of_row(scores[num_drafted - 1], sampling",
        JOINT,
    ),
    Mutant(
        "bonus-from-residual",
        "the formula of the residual is used after a full acceptance, too",
        "a blog's figure",
        VERIFY,
        "return Verdict(num_drafted, target.pick(last))",
        "return Verdict(num_drafted, _residual(target, draft, -1, target_logits.shape[1])"
        ".pick(last) if num_drafted else target.pick(last))",
        JOINT,
    ),
    Mutant(
        "continue-after-rejection",
        "positions after a rejection are judged, too",
        "Chen et al.'s algorithm as printed leaves the stop out",
        VERIFY,
        "            return Verdict(i, (residual",
        "            if i + 1 < len(draft.tokens):\n                continue\n"
        "            return Verdict(i, (residual",
        JOINT,
    ),
    Mutant(
        "residual-of-nothing",
        "where t and d agree to rounding the residual has no mass, and 0 / 0 follows",
        "all that were looked at",
        VERIFY,
        "(residual if residual.total else target).pick(last)",
        "residual.pick(last)",
        "tests/runtime/loop/test_verify.py"
        "::test_a_residual_that_rounds_to_nothing_falls_back_to_the_target",
    ),
    Mutant(
        "certain-residual-keeps-token",
        "a certain draft token that was rejected may be drawn again",
        "",
        VERIFY,
        "weights[draft.tokens[i]] = 0",
        "weights[draft.tokens[i]] *= 1",
        "tests/runtime/drafters/test_drafters.py::test_every_string_has_exactly_the_targets_joint_probability",
    ),
    Mutant(
        "argmax-draft-with-softmax-distribution",
        "the draft's token is its likeliest, the ratio takes its softmax",
        "jaymody/speculative-sampling until 2023, toyllm's first version",
        VERIFY,
        "return distribution.pick(uniform), distribution",
        "return int(distribution.row(len(row.array())).argmax()), distribution",
        JOINT,
    ),
    Mutant(
        "draft-distribution-before-filters",
        "d is the draft's distribution before top-k and top-p",
        "",
        VERIFY,
        "return distribution.pick(uniform), distribution",
        "return distribution.pick(uniform), "
        "probabilities(row.array(), Sampling(sampling.temperature), history)",
        "tests/runtime/test_pipeline.py::test_the_first_tokens_follow_the_targets_own_distribution",
    ),
    Mutant(
        "greedy-by-epsilon",
        "temperature 0 as a small temperature: ties become chances",
        "jaymody/speculative-sampling, toyllm, candle, Speculative-Sampling",
        VERIFY,
        "return choice(row, sampling, history), None",
        "return probabilities(row.array(), Sampling(1e-6), history).pick(uniform), None",
        "tests/runtime/loop/test_verify.py::test_greedy_takes_the_lowest_id_on_ties",
    ),
    Mutant(
        "lenient-by-default",
        "U[0, b] with b below 1 unless asked otherwise",
        "",
        "specedge/options.py",
        "    lenience: float = number(\n        1.0,",
        "    lenience: float = number(\n        0.8,",
        RULE,
    ),
]
