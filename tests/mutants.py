"""Plant known mistakes of speculative decoding, one by one, and expect tests to fail.

    python tests/mutants.py [NAME ...]
    python tests/mutants.py --check

A mutant replaces one function of the product while pytest runs one file of quick tests. The
replacement gets the original function and its arguments. Many of these mistakes were made in
papers, posts and code, which comments name. `--check` runs no test: it verifies that the functions
still exist with the parameters that the replacements take, and that the files exist.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

from specedge.runtime.decoding.protocols import Feed, Operations
from specedge.runtime.decoding.verification import Verdict, _residual, _verify_block
from specedge.runtime.sampling.distribution import Distribution
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities, row_distribution
from specedge.sampling_options import Sampling

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "runtime"

VERIFICATION = "specedge.runtime.decoding.verification:"
NOISE = "specedge.runtime.decoding.random_numbers:GumbelNoise."
DECODER = "specedge.runtime.decoding.decoding:SpeculativeDecoder."
DRAFT_MODEL = "specedge.runtime.drafters.draft_model:DraftModel."
READING = "specedge.runtime.drafters.text_reading:TranslatedText."
PROBABILITIES = "specedge.runtime.sampling.probabilities:"
DISTRIBUTION = "specedge.runtime.sampling.distribution:Distribution."
RESOLVER = "specedge.runtime.decoding.near_ties:NearTieResolver."
DRAFT_HEAD = "specedge.runtime.drafters.draft_head:DraftHead."
OBSERVED = "specedge.runtime.decoding.observed_states:ObservedStates."
ASSEMBLER = "specedge.runtime.text.detokenizer:TextAssembler."


@dataclass(frozen=True)
class Mutant:
    """A replacement of a function, and the file of tests that must fail with it."""

    function: str  # module:function or module:Class.method
    replacement: Callable[..., Any]
    tests: str  # below tests/runtime


MUTANTS: dict[str, Mutant] = {}


def mutant(function: str, tests: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement under its own name."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        MUTANTS[replacement.__name__] = Mutant(function, replacement, tests)
        return replacement

    return register


# The accept rule: `args` of _verify_samples are draft, scores, sampling, history, tests, last, ...


@mutant(VERIFICATION + "_residual", "decoding/test_verification.py")
def recovered_token_from_target(original, target, draft, i, vocab_size, *rest):
    return target


@mutant(VERIFICATION + "_verify_samples", "decoding/test_verification.py")
def accept_with_equality(original, draft, scores, sampling, history, tests, *rest):
    return original(draft, scores, sampling, history, tests - 1e-9, *rest)


@mutant(DISTRIBUTION + "of", "decoding/test_verification.py")
def accept_zero_over_zero(original, self, token):
    return original(self, token) or 1e-12


@mutant(VERIFICATION + "_verify_samples", "decoding/test_decoding.py")
def one_uniform_for_all_positions(original, draft, scores, sampling, history, tests, *rest):
    return original(
        draft, scores, sampling, history, tests[:1].repeat(len(tests)), *rest
    )  # feifeibear/LLMSpeculativeSampling


@mutant(VERIFICATION + "Draft.distribution", "decoding/test_decoding.py")
def draft_distribution_of_previous_position(original, self, i):
    return original(self, i - 1)


@mutant(VERIFICATION + "_residual", "decoding/test_decoding.py")
def residual_of_first_position(original, target, draft, i, vocab_size, *rest):
    return original(target, draft, 0, vocab_size, *rest)


@mutant(VERIFICATION + "_verify_samples", "decoding/test_decoding.py")
def bonus_token_from_row_k(original, draft, scores, *rest):
    count = len(draft.tokens)
    return original(draft, [scores[i] for i in (*range(count), max(0, count - 1))], *rest)


@mutant(VERIFICATION + "_verify_samples", "decoding/test_decoding.py")
def bonus_token_from_residual(original, draft, scores, sampling, history, tests, last, accepted):
    verdict = original(draft, scores, sampling, history, tests, last, accepted)
    count = len(draft.tokens)
    if not count or verdict.num_accepted < count:
        return verdict
    target = row_distribution(scores[count], sampling, history.then(draft.tokens))
    residual = _residual(target, draft, -1, len(scores[count]))
    return Verdict(count, residual.pick(last))


@mutant(VERIFICATION + "_verify_samples", "decoding/test_decoding.py")
def continue_after_rejection(original, draft, scores, sampling, history, tests, last, accepted):
    verdict = original(draft, scores, sampling, history, tests, last, accepted)
    if verdict.num_accepted + 1 >= len(draft.tokens):
        return verdict
    tests = tests.copy()
    tests[verdict.num_accepted] = -1  # accepts
    return original(draft, scores, sampling, history, tests, last, accepted)


@mutant(VERIFICATION + "_residual", "decoding/test_verification.py")
def residual_without_mass(original, *args):
    return SimpleNamespace(total=1.0, pick=original(*args).pick)


@mutant(VERIFICATION + "_residual", "drafters/test_drafters.py")
def residual_keeps_a_certain_token(original, target, draft, i, vocab_size, *rest):
    is_certain = draft.distribution(i) is None
    return target if is_certain else original(target, draft, i, vocab_size, *rest)


@mutant(VERIFICATION + "_residual", "decoding/test_smaller_drafts.py")
def residual_without_unknown_tokens(original, target, draft, i, vocab_size, *rest):
    weights = original(target, draft, i, vocab_size, *rest).weights  # vLLM, pull request 2607
    weights[len(draft.distribution(i).weights) :] = 0
    return Distribution(weights)


@mutant(VERIFICATION + "draw", "decoding/test_decoding.py")
def argmax_token_with_softmax_distribution(original, row, *rest):
    token, distribution = original(row, *rest)  # jaymody/speculative-sampling until 2023
    if distribution is not None:
        token = int(distribution.row(len(row.array())).argmax())
    return token, distribution


@mutant(VERIFICATION + "draw", "test_pipeline.py")
def draft_distribution_before_filters(original, row, sampling, history, uniform):
    token, _ = original(row, sampling, history, uniform)
    return token, row_distribution(row, Sampling(sampling.temperature), history)


@mutant(VERIFICATION + "draw", "decoding/test_other_tokenizers.py")
def translated_distribution_before_filters(original, row, sampling, history, uniform):
    return draft_distribution_before_filters(original, row, sampling, history, uniform)


@mutant(READING + "length", "decoding/test_other_tokenizers.py")
def rollback_by_length_of_text(original, self, num_tokens):
    return min(num_tokens, original(self, num_tokens))


@mutant(VERIFICATION + "_choose", "decoding/test_verification.py")
def greedy_by_a_small_temperature(original, row, sampling, history):
    return row_distribution(row, Sampling(1e-6), history).pick(0.99)  # candle, toyllm


@mutant(VERIFICATION + "_verify_samples", "decoding/test_verification.py")
def lenient_by_default(original, draft, scores, sampling, *rest):
    return original(draft, scores, replace(sampling, lenience=0.8), *rest)


@mutant(VERIFICATION + "_residual", "decoding/test_block_verification.py")
def block_residual_without_joint_ratio(original, target, draft, i, vocab_size, ratio=1.0):
    return original(target, draft, i, vocab_size)  # vllm-ascend, issue 7807


@mutant(VERIFICATION + "_verify_block", "decoding/test_block_verification.py")
def one_uniform_for_all_prefixes(original, draft, scores, sampling, history, tests, *rest):
    return original(draft, scores, sampling, history, [tests[0]] * len(draft.tokens), *rest)


@mutant(VERIFICATION + "_verify_samples", "decoding/test_block_verification.py")
def block_of_deterministic_tokens(original, *args):
    return _verify_block(*args)  # vllm-ascend, pull request 7839


# Gumbel coupling.


@mutant(NOISE + "choose", "decoding/test_coupling.py")
def noise_of_first_position(original, self, distribution, position):
    return original(self, distribution, 0)


@mutant(NOISE + "choose", "decoding/test_coupling.py")
def noise_by_column(original, self, distribution, position):
    column = original(self, Distribution(distribution.weights), position)
    return column if distribution.ids is None else int(distribution.ids[column])


@mutant(VERIFICATION + "_choose", "decoding/test_coupling.py")
def noise_of_the_round(original, row, sampling, history):
    if sampling.noise is None:
        return original(row, sampling, history)
    return sampling.noise.choose(row_distribution(row, sampling, history), history.num_committed)


@mutant(NOISE + "choose", "decoding/test_coupling.py")
def noise_of_likely_tokens(original, self, distribution, position):
    weights = distribution.weights
    return original(
        self, Distribution(weights * (weights >= weights.max() / 2), distribution.ids), position
    )


# Draft heads.


@mutant(OBSERVED + "read", "drafters/test_draft_head.py")
def state_of_the_token_itself(original, self, start, end):
    states = original(self, start, end)
    return np.concatenate([states[1:], states[-1:]])


@mutant(DRAFT_HEAD + "truncate", "drafters/test_draft_head.py")
def rows_of_own_states_are_kept(original, self, length):
    original(self, length)
    self.model.observed.num_rows = self.model.length


@mutant(OBSERVED + "truncate", "drafters/test_draft_head.py")
def states_of_rejected_tokens_are_kept(original, self, end):
    pass


@mutant(DECODER + "_observe", "drafters/test_draft_head.py")
def states_of_another_position(original, self, observer):
    hidden = self.target.hidden
    observer.observe(self.target.length - len(hidden), np.roll(hidden, 1, axis=0))


@mutant(DRAFT_HEAD + "_next_row", "drafters/test_draft_head.py")
def one_state_for_all_further_tokens(original, self, text, first):
    row = yield from original(self, text, first)
    self._returned = [self._returned[0] for _ in self._returned]
    return row


# Distributions, edits and near-ties.


@mutant("specedge.runtime.sampling.top_k_p:top", "sampling/test_top_k_p.py")
def top_k_without_ties(original, logits, k):
    columns = original(logits, k)
    return np.sort(columns[np.argsort(-logits[columns], kind="stable")[:k]])


@mutant("specedge.runtime.sampling.top_k_p:nucleus", "sampling/test_probabilities.py")
def nucleus_without_its_last_token(original, weights, share):
    weights = original(weights, share)  # candle
    kept = weights[weights > 0]
    return weights * (weights > kept.min()) if len(kept) > 1 else weights


@mutant(PROBABILITIES + "probabilities", "sampling/test_transformers_processors.py")
def top_p_before_temperature(original, logits, sampling, history, ids=None):
    nucleus = original(logits, replace(sampling, temperature=1.0), history, ids)
    allowed = nucleus.row(len(logits)) > 0
    whole = original(logits, replace(sampling, top_p=1.0), history, ids)
    return Distribution(whole.weights_of_all(len(logits)) * allowed)


@mutant(VERIFICATION + "_verify_samples", "sampling/test_logits_processors.py")
def penalties_count_all_draft_tokens(original, draft, *rest):
    return original(replace(draft, tokens=_Sliced(draft.tokens, slice(None))), *rest)


@mutant(VERIFICATION + "_verify_choices", "sampling/test_logits_processors.py")
def penalties_count_no_draft_token(original, tokens, *rest):
    return original(_Sliced(tokens, slice(0)), *rest)


class _Sliced(list[int]):
    """Tokens every slice of which is the same one."""

    def __init__(self, tokens: list[int], part: slice) -> None:
        super().__init__(tokens)
        self._part = part

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._part if isinstance(index, slice) else index)


@mutant(PROBABILITIES + "row_distribution", "decoding/test_reduced_heads.py")
def reduced_vocabulary_without_ids(original, row, sampling, history):
    return probabilities(row.array(), sampling, history)


@mutant("specedge.runtime.sampling.logits_processors:_column", "decoding/test_reduced_heads.py")
def edit_of_the_next_token(original, token, ids):
    column = token if ids is None else int(ids.searchsorted(token))
    return slice(column, column + 1)


@mutant(
    "specedge.runtime.sampling.logits_processors:_banned_tokens", "decoding/test_repeated_ngrams.py"
)
def bans_ignore_draft_tokens(original, sampling, history):
    return original(sampling, _without_draft(history))


def _without_draft(history: History) -> History:
    tokens, count = history.tokens[: history.num_committed], history.num_prompt_tokens
    return History(tokens[:count], tokens[count:])


@mutant(
    "specedge.runtime.sampling.logits_processors:apply_timestamp_rules",
    "sampling/test_timestamps.py",
)
def timestamps_ignore_draft_tokens(original, logits, rules, history, ids):
    return original(logits, rules, _without_draft(history), ids)


@mutant(DISTRIBUTION + "pick", "sampling/test_probabilities.py")
def draw_below_a_boundary(original, self, uniform):
    return original(self, uniform - 1e-12)


@mutant(RESOLVER + "_recompute", "decoding/test_near_ties.py")
def exact_pass_over_rows_of_longer_passes(original, self, text, sampling):
    self._num_plain = len(text.tokens) - 1
    return original(self, text, sampling)


@mutant(RESOLVER + "_is_near_tie", "decoding/test_near_ties.py")
def tie_margin_of_one_logit(original, self, *rest):
    return original(SimpleNamespace(noise=self.noise / 2), *rest)


# The decoding loop, caches and the end of a text.


class _Target:
    """A target model with one method replaced."""

    def __init__(self, model: Any, **methods: Any) -> None:
        self._model = model
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _with_target(decoder: Any, operations: Operations[Any], **methods: Any) -> Operations[Any]:
    target, decoder.target = decoder.target, _Target(decoder.target, **methods)
    try:
        return (yield from operations)
    finally:
        decoder.target = target


@mutant(DECODER + "_round", "decoding/test_decoding.py")
def target_cache_without_rollback(original, self, *args):
    return _with_target(self, original(self, *args), truncate=lambda length: None)


@mutant(DECODER + "_round", "decoding/test_decoding.py")
def target_cache_one_row_short(original, self, *args):
    truncate = self.target.truncate
    return _with_target(self, original(self, *args), truncate=lambda length: truncate(length - 1))


@mutant(DECODER + "_prefill", "decoding/test_decoding.py")
def prefill_of_the_whole_prompt(original, self, history):
    num_unread = yield from original(self, history)
    yield Feed(self.target, history.tokens[-1:], 0)
    return num_unread


@mutant(DECODER + "_prefill_rest", "decoding/test_first_passes.py")
def first_pass_without_the_draft(original, self, prompt, num_unread, num_draft_tokens):
    return original(self, prompt, num_unread, 0)


@mutant(DECODER + "_prefill", "test_requests.py")
def cache_of_another_request(original, self, *args):
    return _with_target(self, original(self, *args), reuse=lambda tokens: 0)  # toyllm


@mutant("specedge.runtime.decoding.random_numbers:Uniforms.take", "decoding/test_decoding.py")
def same_uniforms_every_round(original, self, count):
    return original(type(self)(self._seed), count)


@mutant(DECODER + "_round", "decoding/test_decoding.py")
def draws_and_tests_share_uniforms(original, self, step, history, sampling, numbers, *rest):
    draws = numbers[: step.num_draft_tokens]
    return original(
        self, step, history, sampling, np.concatenate([draws, draws, numbers[-1:]]), *rest
    )


@mutant(DECODER + "_round", "decoding/test_decoding.py")
def last_draw_shares_a_test(original, self, step, history, sampling, numbers, *rest):
    numbers = np.concatenate([numbers[:-1], numbers[-2:-1] if len(numbers) > 1 else numbers])
    return original(self, step, history, sampling, numbers, *rest)


@mutant(DRAFT_MODEL + "truncate", "decoding/test_decoding.py")
def draft_cache_without_rollback(original, self, length):
    self._is_new_text = self._is_new_text or length <= self._start  # candle


@mutant(DRAFT_MODEL + "_catch_up", "decoding/test_decoding.py")
def draft_misses_its_last_token(original, self, history):
    pending, limit = yield from original(self, history)  # candle
    return pending[-1:], limit


@mutant(DRAFT_MODEL + "truncate", "test_reuse.py")
def draft_cache_of_another_text(original, self, length):
    begins = self._is_new_text
    original(self, length)
    self._is_new_text = begins


@mutant("specedge.runtime.sampling.history:common_prefix_length", "test_reuse.py")
def reuse_of_one_token_too_many(original, first, second):
    return min(original(first, second) + 1, len(first), len(second))


@mutant(ASSEMBLER + "__init__", "test_pipeline.py")
def more_tokens_than_the_limit(original, self, *args, limit, **options):
    original(self, *args, limit=limit + 1, **options)  # jaymody/speculative-sampling, candle


@mutant(ASSEMBLER + "_add", "test_pipeline.py")
def tokens_after_the_end(original, self, token, fate):
    if fate == "accepted":  # jaymody/speculative-sampling, candle
        self._ends = frozenset()
    return original(self, token, fate)


@mutant("specedge.runtime.text.detokenizer:TextBuffer.add", "text/test_detokenizer.py")
def stop_string_at_the_end_missed(original, self, text, outcome=None):
    stops = self._stops
    if (self._held + text).endswith(stops):  # vLLM, pull request 2607
        self._stops = ()
    original(self, text, outcome)
    self._stops = stops


@mutant("specedge.runtime.sampling.logprobs:token_logprobs", "sampling/test_logprobs.py")
def logprobs_of_the_next_row(original, scores, tokens, count):
    rows = [scores[min(i + 1, len(tokens) - 1)] for i in range(len(tokens))]
    return original(rows, tokens, count)


def locate(function: str) -> tuple[Any, str]:
    """Return the module or class that holds a function, and the function's name there."""
    module, _, path = function.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    getattr(owner, name)
    return owner, name


def has_parameters(mutant: Mutant) -> bool:
    """Return True if a replacement takes the original and its arguments."""
    owner, name = locate(mutant.function)
    parameters = inspect.signature(getattr(owner, name)).parameters.values()
    keywords = {p.name: None for p in parameters if p.kind == p.KEYWORD_ONLY}
    positional = [p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD]
    try:
        inspect.signature(mutant.replacement).bind(None, *positional, **keywords)
    except TypeError:
        return False
    return True


def plant(mutant: Mutant) -> None:
    """Replace a function in every loaded module that refers to it."""
    owner, name = locate(mutant.function)
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **options: Any) -> Any:
        return mutant.replacement(original, *args, **options)

    setattr(owner, name, replacement)
    for module in list(sys.modules.values()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is original and module.__name__ != __name__:
                setattr(module, key, replacement)


class Planting:
    """A pytest plugin that plants a mutant when all tests are imported."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def pytest_collection_finish(self) -> None:
        """Replace the function."""
        plant(self._mutant)


def run_tests(files: Iterable[str], mutant: Mutant | None = None) -> int:
    """Run files of quick tests in a forked process, which has all imports; return the exit code."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(files, mutant))
    process.start()
    process.join()
    return process.exitcode or 0


def _run(files: Iterable[str], mutant: Mutant | None) -> None:
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        arguments = [*options, *(str(TESTS / file) for file in files)]
        sys.exit(pytest.main(arguments, plugins=[Planting(mutant)] if mutant else []))


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(MUTANTS)))
@click.option("--check", is_flag=True, help="Verify only functions, their parameters and files.")
def main(names: tuple[str, ...], check: bool) -> None:
    """Expect failing tests for each mutant (default: all)."""
    mutants = {name: MUTANTS[name] for name in names or MUTANTS}
    for name, mutant in mutants.items():
        try:
            locate(mutant.function)
        except (ImportError, AttributeError) as error:
            raise click.ClickException(f"{name}: {mutant.function} is missing") from error
        if not has_parameters(mutant):
            raise click.ClickException(f"{name}: {mutant.function} has other parameters")
        if not (TESTS / mutant.tests).exists():
            raise click.ClickException(f"{name}: {TESTS / mutant.tests} is missing")
    if check:
        return
    if run_tests(dict.fromkeys(mutant.tests for mutant in mutants.values())):
        raise click.ClickException("tests fail without a mutant; run pytest")
    survivors = []
    for name, mutant in mutants.items():
        # Every other exit code means that no test failed, or that none ran.
        killed = run_tests([mutant.tests], mutant) == pytest.ExitCode.TESTS_FAILED
        click.echo(f"{name}: {'killed' if killed else 'SURVIVED'}")
        survivors += [] if killed else [name]
    if survivors:
        raise click.ClickException(f"survivors: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
