"""Known mistakes of speculative decoding, each as one change of a line of the source."""

from __future__ import annotations

from dataclasses import dataclass

VERIFY = "runtime/loop/verify.py"
PROBABILITIES = "runtime/sampling/probabilities.py"
TOP_K_P = "runtime/sampling/top_k_p.py"
LOGIT_EDITS = "runtime/sampling/logit_edits.py"
DISTRIBUTION = "runtime/sampling/distribution.py"
DECODING = "runtime/loop/decoding.py"
DRAFTERS = "runtime/drafters/draft_model.py"
LOOKUP = "runtime/drafters/prompt_lookup.py"
ASSEMBLER = "runtime/text/assembler.py"
TEXT = "runtime/text/detokenizer.py"
LOGPROBS = "runtime/sampling/logprobs.py"
NEAR_TIES = "runtime/exactness/near_ties.py"

RULE = "tests/runtime/loop/test_verify.py::test_the_accept_rule_gives_the_targets_law_for_any_draft"
JOINT = (
    "tests/runtime/loop/test_decoding.py"
    "::test_every_string_has_exactly_the_targets_joint_probability"
)

GREEDY = "tests/runtime/loop/test_decoding.py::test_greedy_output_equals_the_target_alone"


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


MUTANTS = [
    # The accept rule.
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
        "if not sampling.lenience * tests[i] * drafted < target.of(token)",
        "if not sampling.lenience * tests[i] * drafted <= target.of(token)",
        "tests/runtime/loop/test_verify.py"
        "::test_a_token_that_the_target_never_gives_is_not_accepted_even_by_zero",
    ),
    Mutant(
        "accept-on-nan",
        "min(1, t / d) with d = 0: 0 / 0 passes",
        "jaymody/speculative-sampling, toyllm",
        VERIFY,
        "if not sampling.lenience * tests[i] * drafted < target.of(token)",
        "if tests[i] >= min(1, np.float64(target.of(token)) / drafted)",
        "tests/runtime/loop/test_verify.py"
        "::test_a_token_without_probability_in_either_law_is_not_accepted",
    ),
    Mutant(
        "shared-uniform",
        "one random number for all positions of a round",
        "a blog's note; feifeibear/LLMSpeculativeSampling seeds inside its loop",
        VERIFY,
        "sampling.lenience * tests[i] * drafted",
        "sampling.lenience * tests[0] * drafted",
        JOINT,
    ),
    Mutant(
        "draft-law-of-another-row",
        "the ratio takes d of the draft position before",
        "",
        VERIFY,
        "law = draft.law(i)\n        drafted",
        "law = draft.law(i - 1)\n        drafted",
        JOINT,
    ),
    Mutant(
        "residual-of-another-row",
        "the residual takes d from another draft position's row",
        "",
        VERIFY,
        "draft.law(i)\n    if drafted is None",
        "draft.law(0)\n    if drafted is None",
        JOINT,
    ),
    Mutant(
        "bonus-from-row-k",
        "the bonus token is drawn from the target's row K, not K + 1",
        "",
        VERIFY,
        "target = probabilities(scores[num_drafted].array(), sampling",
        "target = probabilities(scores[num_drafted - 1].array(), sampling",
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
        "argmax-draft-with-softmax-law",
        "the draft's token is its likeliest, the ratio takes its softmax",
        "jaymody/speculative-sampling until 2023, toyllm's first version",
        VERIFY,
        "return law.pick(uniform), law",
        "return int(law.row(len(row.array())).argmax()), law",
        JOINT,
    ),
    Mutant(
        "draft-law-before-filters",
        "d is the draft's law before top-k and top-p",
        "",
        VERIFY,
        "return law.pick(uniform), law",
        "return law.pick(uniform), "
        "probabilities(row.array(), Sampling(sampling.temperature), past)",
        "tests/runtime/test_pipeline.py::test_the_first_tokens_follow_the_targets_own_law",
    ),
    Mutant(
        "greedy-by-epsilon",
        "temperature 0 as a small temperature: ties become chances",
        "jaymody/speculative-sampling, toyllm, candle, Speculative-Sampling",
        VERIFY,
        "return choice(row, sampling, past), None",
        "return probabilities(row.array(), Sampling(1e-6), past).pick(uniform), None",
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
    # Laws.
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
        "    if sampling.top_p < 1:\n        weights *= nucleus(_weights(scores if ids is None"
        " else scores[ids], largest, 1.0), sampling.top_p) > 0",
        "tests/runtime/sampling/test_transformers_processors.py::test_random_combinations_do_what_transformers_does",
    ),
    Mutant(
        "penalty-of-later-drafts",
        "penalties at a draft position count all drafted tokens",
        "",
        VERIFY,
        "target = probabilities(logits, sampling, past.then(draft.tokens[:i]))",
        "target = probabilities(logits, sampling, past.then(draft.tokens))",
        "tests/runtime/sampling/test_logit_edits.py"
        "::test_speculating_with_edits_is_speculating_with_laws_that_have_them",
    ),
    Mutant(
        "penalty-of-committed-only",
        "penalties at a draft position count no drafted token",
        "",
        VERIFY,
        "chosen = choice(scores[i], sampling, past.then(tokens[:i]))",
        "chosen = choice(scores[i], sampling, past)",
        "tests/runtime/sampling/test_logit_edits.py::test_speculative_text_equals_plain_text_under_every_edit",
    ),
    Mutant(
        "residual-without-what-the-draft-lacks",
        "tokens that the draft does not know have no part in the residual",
        "vLLM, pull request 2607",
        VERIFY,
        "    scale = weights.dtype.type(target.total / drafted.total)\n",
        "    scale = weights.dtype.type(target.total / drafted.total)\n"
        "    weights[len(drafted.weights) :] = 0\n",
        "tests/runtime/loop/test_unlike_drafts.py"
        "::test_a_smaller_vocabulary_leaves_the_joint_law_as_it_is",
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
    # Near-ties.
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
    # The loop and its caches.
    Mutant(
        "target-cache-not-rolled-back",
        "rows of rejected tokens stay in the target's cache",
        "",
        DECODING,
        "        self.target.truncate(len(past.tokens) - 1)\n",
        "",
        GREEDY,
    ),
    Mutant(
        "target-cache-one-row-short",
        "the last committed token but one is fed again",
        "",
        DECODING,
        "        self.target.truncate(len(past.tokens) - 1)\n",
        "        self.target.truncate(len(past.tokens) - 2)\n",
        GREEDY,
    ),
    Mutant(
        "draft-cache-not-rolled-back",
        "rows of rejected tokens stay in the draft's cache",
        "candle keeps a rejected token's row",
        DRAFTERS,
        "            self.model.truncate(min(length - self._start, self.model.length))\n",
        "            pass\n",
        "tests/runtime/loop/test_decoding.py::test_after_a_rejection_the_draft_feeds_one_token",
    ),
    Mutant(
        "draft-misses-its-last-token",
        "after a full acceptance the draft never reads its own last token",
        "candle",
        DRAFTERS,
        "        if len(feed) > 2:\n            self.model.prefill(feed[:-1])\n",
        "        if len(feed) > 1:\n",
        "tests/runtime/loop/test_decoding.py"
        "::test_a_draft_that_equals_its_target_gives_k_plus_one_tokens_every_round",
    ),
    Mutant(
        "prefill-of-the-whole-prompt",
        "the prompt's last token is in the cache before it leads the first pass",
        "",
        DECODING,
        "self.target.prefill(tokens[kept:-1])",
        "self.target.prefill(tokens[kept:])",
        JOINT,
    ),
    Mutant(
        "cache-of-another-request",
        "the cache is not emptied between two requests",
        "toyllm",
        DECODING,
        "kept = self.target.reuse(tokens[:-1])",
        "kept = 0",
        "tests/runtime/test_requests.py::test_a_stream_may_be_left_and_the_pipeline_used_again",
    ),
    Mutant(
        "the-same-uniforms-every-round",
        "the generator is seeded again every round",
        "feifeibear/LLMSpeculativeSampling",
        DECODING,
        "            consumed += count\n",
        "            consumed += 0 * count\n",
        "tests/runtime/loop/test_decoding.py::test_sampled_pairs_of_tokens_follow_the_targets_law",
    ),
    Mutant(
        "draws-and-tests-share-uniforms",
        "a token is tested with the number that it was drawn with",
        "",
        DECODING,
        "us[k : 2 * k]",
        "us[:k]",
        JOINT,
    ),
    Mutant(
        "last-draw-shares-a-test",
        "the recovered token is drawn with the number of a test",
        "",
        DECODING,
        "float(us[-1])",
        "float(us[-2])",
        JOINT,
    ),
    Mutant(
        "lookup-of-an-unkept-text",
        "the lookup's index keeps tokens that were taken back",
        "",
        LOOKUP,
        "        self._index.truncate(length)\n",
        "        pass\n",
        "tests/runtime/drafters/test_prompt_lookup.py::test_another_text_begins_with_nothing_known",
    ),
    # The text's end.
    Mutant(
        "more-tokens-than-asked",
        "the last round is not cut",
        "jaymody/speculative-sampling, toyllm, candle, Speculative-Sampling and others",
        ASSEMBLER,
        "elif len(self.tokens) == self._limit:",
        "elif len(self.tokens) > self._limit:",
        "tests/runtime/test_pipeline.py::test_as_many_tokens_as_asked_for",
    ),
    Mutant(
        "tokens-after-the-end",
        "an end token inside a round does not end the text",
        "jaymody/speculative-sampling, toyllm, candle, Speculative-Sampling",
        ASSEMBLER,
        "        if token in self._ends:\n",
        "        if token in self._ends and fate != 'accepted':\n",
        "tests/runtime/test_pipeline.py::test_an_end_token_inside_a_round_ends_the_text_there",
    ),
    Mutant(
        "stop-string-at-the-end-missed",
        "a stop string that ends the text so far is not seen",
        "vLLM, pull request 2607",
        TEXT,
        "if (at := self._held.find(stop)) >= 0]",
        "if 0 <= (at := self._held.find(stop)) < len(self._held) - len(stop)]",
        "tests/runtime/text/test_detokenizer.py::test_text_ends_before_the_stop_string_however_it_is_cut",
    ),
    Mutant(
        "logprobs-of-the-next-row",
        "log-probabilities are those of the row after a token's own",
        "",
        LOGPROBS,
        "_of_token(scores[i], token, count)",
        "_of_token(scores[min(i + 1, len(tokens) - 1)], token, count)",
        "tests/runtime/sampling/test_logprobs.py::test_each_emitted_token_has_one_and_dropped_ones_none",
    ),
]
