"""Mistakes in what a token is drawn from, and in deciding near-ties."""

from __future__ import annotations

from .mutant import DISTRIBUTION, LOGIT_EDITS, NEAR_TIES, PROBABILITIES, TOP_K_P, VERIFY, Mutant

DISTRIBUTIONS = [
    Mutant(
        "top-k-drops-ties",
        "top-k keeps k tokens, whichever of those that tie",
        "",
        TOP_K_P,
        "return candidates[values >= _kth(values, k)]",
        "return np.sort(candidates[np.argsort(-values, kind='stable')[:k]])",
        "tests/runtime/sampling/test_top_k_p.py::test_the_top_k_are_those_of_a_sort_with_every_tie",
    ),
    Mutant(
        "nucleus-without-its-last",
        "top-p leaves out the token that reaches p",
        "candle",
        TOP_K_P,
        "    stay = values >= last\n",
        "    stay = values > last\n",
        "tests/runtime/sampling/test_probabilities.py::test_top_p_keeps_the_smallest_set_that_reaches_it",
    ),
    Mutant(
        "temperature-after-top-p",
        "the nucleus is taken before the temperature",
        "several: the order differs from code to code",
        PROBABILITIES,
        "    if sampling.top_p < 1:\n        weights = nucleus(weights, sampling.top_p)",
        "    if sampling.top_p < 1:\n"
        "        weights *= nucleus(_weights(scores, largest, 1.0), sampling.top_p) > 0",
        "tests/runtime/sampling/test_transformers_processors.py::test_random_combinations_do_what_transformers_does",
    ),
    Mutant(
        "penalty-of-later-drafts",
        "penalties at a draft position count all drafted tokens",
        "",
        VERIFY,
        "target = of_row(row, sampling, history.then(draft.tokens[:i]))",
        "target = of_row(row, sampling, history.then(draft.tokens))",
        "tests/runtime/sampling/test_logit_edits.py"
        "::test_speculating_with_edits_is_speculating_with_distributions_that_have_them",
    ),
    Mutant(
        "penalty-of-committed-only",
        "penalties at a draft position count no drafted token",
        "",
        VERIFY,
        "chosen = _choice(scores[i], sampling, history.then(tokens[:i]))",
        "chosen = _choice(scores[i], sampling, history)",
        "tests/runtime/sampling/test_logit_edits.py::test_speculative_text_equals_plain_text_under_every_edit",
    ),
    Mutant(
        "columns-for-tokens",
        "the columns of a draft's cut head are taken for the tokens from 0 on",
        "",
        PROBABILITIES,
        "return probabilities(row.array(), sampling, history, row.ids)",
        "return probabilities(row.array(), sampling, history)",
        "tests/runtime/decoding/test_cut_heads.py::test_only_what_the_head_has_is_drafted",
    ),
    Mutant(
        "edits-of-the-next-token",
        "an option for a token that a cut head lacks changes the next token that it has",
        "",
        LOGIT_EDITS,
        "slice(at, at + int(at < len(ids) and ids[at] == token))",
        "slice(at, at + 1)",
        "tests/runtime/decoding/test_cut_heads.py::test_an_edit_of_a_token_that_the_head_lacks_moves_no_other",
    ),
    Mutant(
        "residual-without-what-the-draft-lacks",
        "tokens that the draft does not know have no part in the residual",
        "vLLM, pull request 2607",
        VERIFY,
        "    weights[drawn_from.where] -= scale * drawn_from.weights\n",
        "    weights[drawn_from.where] -= scale * drawn_from.weights\n"
        "    weights[len(drawn_from.weights) :] = 0\n",
        "tests/runtime/decoding/test_unlike_drafts.py"
        "::test_a_smaller_vocabulary_leaves_the_joint_distribution_as_it_is",
    ),
    Mutant(
        "draw-at-a-boundary",
        "a uniform at a boundary of the CDF draws the token before it, also one without weight",
        "",
        DISTRIBUTION,
        'at = int(cdf.searchsorted(goal, "right"))',
        'at = int(cdf.searchsorted(goal, "left"))',
        "tests/runtime/sampling/test_probabilities.py::test_pick_never_draws_a_token_without_weight",
    ),
    Mutant(
        "exact-from-rows-of-wide-passes",
        "a near-tie is decided by one one-token pass over rows that wider passes wrote",
        "",
        NEAR_TIES,
        "        self.target.truncate(self._num_plain)\n",
        "        self._num_plain = len(tokens) - 1\n"
        "        self.target.truncate(len(tokens) - 1)\n",
        "tests/runtime/exactness/test_near_ties.py"
        "::test_exact_tokens_are_plain_decodings_whatever_the_noise_turns",
    ),
    Mutant(
        "near-ties-of-half-the-noise",
        "a choice counts as a near-tie within the noise of one logit, though two have it",
        "",
        NEAR_TIES,
        "- 2 * self.noise *",
        "- 1 * self.noise *",
        "tests/runtime/exactness/test_near_ties.py::test_where_noise_turns_a_choice_it_was_a_near_tie",
    ),
]
