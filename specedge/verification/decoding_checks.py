"""Deterministic checks: caches after rollbacks, self-draft, greedy text, coupled text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.protocols import Round
from specedge.runtime.decoding.random_numbers import GumbelNoise
from specedge.runtime.drafters.suffix import Suffix
from specedge.sampling_options import MAX_DRAFT_TOKENS, Sampling

from .audited_pair import ROWS, AuditedPair, AuditPrompt, first_tokens
from .budget import Budget
from .noise import CachedModel, distance, size
from .report import FAILED, PASSED, SHORT, CheckResult

COUPLED_TOKENS = 24  # tokens per text of the coupled check
LEAST_TOKENS = 32  # minimum tokens for a conclusive check
NUM_RUNS = 4


def caches(pair: AuditedPair, budget: Budget) -> CheckResult:
    """Compare logits and cache rows after rollbacks with those of one pass over the text."""
    problems, lines, details = [], [], {}
    short = False
    models = {"target": pair.parts.target(pair.target), "draft": pair.draft}
    for role in pair.roles:
        model = models[role]
        text = pair.text(role)
        runs = 0
        worst = 0.0
        for seed in range(NUM_RUNS):
            if budget.over:
                break
            worst = max(worst, _after_rollbacks(model, text, pair.num_draft_tokens + 1, seed))
            runs += 1
        limit = pair.tolerance if pair.noise.get(role) else 0.0
        details[role] = {"num_texts": runs, "num_tokens": len(text), "relative_difference": worst}
        short |= not runs
        if worst > limit:
            problems.append(
                f"{role}: after rollbacks, its logits or cache rows differ by {worst:.1e} of the "
                "largest value"
            )
        elif runs:
            agreement = (
                "bitwise equal" if worst == 0 else f"within {worst:.1e} of the largest value"
            )
            lines.append(f"{role}: {runs} texts of {len(text)} tokens, {agreement}")
    if problems:
        return CheckResult("caches", FAILED, problems[0], tuple(problems[1:] + lines), details)
    if short:
        return CheckResult("caches", SHORT, "no text for one of the models", tuple(lines), details)
    summary = "logits and cache rows after rollbacks equal those of a run without rollbacks"
    return CheckResult("caches", PASSED, summary, tuple(lines), details)


def _after_rollbacks(model: CachedModel, text: list[int], most: int, seed: int) -> float:
    """Return the largest relative difference after rounds as a decoder runs them.

    Each round feeds some tokens of the text and others that are rolled back.
    """
    random = np.random.default_rng(seed)
    model.truncate(0)
    expected = model.forward(text).array().copy()
    expected_rows = model.cache_rows(0, len(text))
    model.truncate(0)
    at, worst = 0, 0.0
    while at < len(text):
        total = min(int(random.integers(1, most + 1)), len(text) - at)
        kept = int(random.integers(1, total + 1))
        others = [text[int(i)] for i in random.integers(len(text), size=total - kept)]
        logits = model.forward([*text[at : at + kept], *others]).array()[:kept]
        worst = max(worst, distance(logits, expected[at : at + kept]) / size(expected))
        at += kept
        model.truncate(at)
    rows = model.cache_rows(0, len(text))
    return max(worst, *(distance(a, b) / size(b) for a, b in zip(rows, expected_rows, strict=True)))


def self_draft(pair: AuditedPair, budget: Budget) -> CheckResult:
    """Use the target as its own draft model: all draft tokens must be accepted."""
    draft = pair.target.with_new_cache()
    k = pair.num_draft_tokens
    decoder = pair.decoder(k, draft=draft, draft_sizes=pair.sizes["target"])
    count = min(ROWS, pair.sizes["target"].context_length // 2)
    details, lines = {}, []
    rejected = tested = 0
    short = False
    for temperature in (0.0, 1.0):
        rounds: list[Round] = []
        prompt, source = list(pair.prompts[0].tokens[-count:]), pair.prompts[0].source
        for round_ in decoder.rounds(prompt, Sampling(temperature), 0, count, source=source):
            rounds.append(round_)
            if budget.over:
                break
        drafted = sum(r.num_drafted for r in rounds)
        accepted = sum(r.num_accepted for r in rounds)
        rejected, tested = rejected + drafted - accepted, tested + drafted
        num_tokens = sum(len(r.tokens) for r in rounds)
        short |= num_tokens < min(LEAST_TOKENS, count)
        details[f"temperature_{temperature:g}"] = {
            "num_rounds": len(rounds), "num_drafted": drafted, "num_accepted": accepted,
        }  # fmt: skip
        lines.append(
            f"temperature {temperature:g}: {accepted} of {drafted} draft tokens are accepted, "
            f"{num_tokens} tokens in {len(rounds)} rounds"
        )
    # Near-ties may be decided differently if passes are not batch-invariant.
    if rejected > (tested // 50 if pair.noise.get("target") else 0):
        summary = f"the target rejected {rejected} of {tested} of its own draft tokens"
        return CheckResult("self-draft", FAILED, summary, tuple(lines), details)
    if short:
        return CheckResult("self-draft", SHORT, "too few tokens", tuple(lines), details)
    summary = f"the target accepts all its own draft tokens, K + 1 = {k + 1} tokens per round"
    return CheckResult("self-draft", PASSED, summary, tuple(lines), details)


@dataclass
class _GreedyTexts:
    """Accumulated results of the comparison of greedy texts."""

    num_texts: int = 0
    by_k: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)
    smallest_margin: float = math.inf
    num_positions: int = 0


def greedy(pair: AuditedPair, budget: Budget) -> CheckResult:
    """Compare speculative text at temperature 0 with the target alone, token by token.

    Texts may differ only at near-ties, where the margin of the two largest logits is at most twice
    the noise of the device.
    """
    ks = pair.greedy_ks
    # Without a draft model, suffix decoding drafts, as in requests.
    has_draft = "draft" in pair.roles
    decoders = {
        k: pair.decoder(k, drafter=None if has_draft else Suffix())
        for k in ks
        if k <= MAX_DRAFT_TOKENS
    }
    texts = _GreedyTexts(by_k=dict.fromkeys(decoders, 0))
    for prompt in pair.greedy_prompts:
        if budget.over:
            break
        num_free = pair.sizes["target"].context_length - len(prompt.tokens)
        plain = _target_alone(pair, prompt, min(ROWS, num_free), budget)
        ties = _near_ties(pair, texts, prompt, plain)
        for k, decoder in decoders.items():
            if budget.over:
                break
            # As in a request, the first pass may include the end of the prompt.
            pair.target.truncate(max(0, len(prompt.tokens) - ROWS))
            text = _tokens(decoder, prompt, len(plain), budget)
            texts.by_k[k] += _compare(texts, f"{prompt.name}, K = {k}", text, plain, ties)
        texts.num_texts += 1
    return _greedy_finding(pair, texts)


def _greedy_finding(pair: AuditedPair, texts: _GreedyTexts) -> CheckResult:
    details: dict[str, Any] = {
        "num_prompts": texts.num_texts,
        "num_tokens_by_k": {str(k): count for k, count in texts.by_k.items()},
        "noise": pair.noise.get("target", 0.0),
        "near_ties": texts.near_ties,
        "smallest_margin": texts.smallest_margin,
        "differences": texts.problems,
    }
    lines = [
        f"tokens compared by K: {', '.join(f'{k}: {n}' for k, n in texts.by_k.items())}",
        f"near-ties: {len(texts.near_ties)} of {texts.num_positions} positions, where the two "
        "largest logits are within twice this device's noise of "
        f"{pair.noise.get('target', 0.0):.1e}",
        f"the closest two logits are {texts.smallest_margin:.1e} apart",
        *texts.near_ties[:10],
    ]
    if texts.problems:
        summary = f"{len(texts.problems)} texts differ from plain decoding"
        return CheckResult("greedy", FAILED, summary, tuple(texts.problems[:10] + lines), details)
    if min(texts.by_k.values()) < LEAST_TOKENS:
        return CheckResult("greedy", SHORT, "too few tokens for some K", tuple(lines), details)
    summary = (
        f"{sum(texts.by_k.values())} tokens over {texts.num_texts} prompts and "
        f"{len(texts.by_k)} K equal plain decoding"
    )
    return CheckResult("greedy", PASSED, summary, tuple(lines), details)


def _target_alone(pair: AuditedPair, prompt: AuditPrompt, count: int, budget: Budget) -> list[int]:
    """Decode greedily with the target alone, one token per pass."""
    model = pair.target
    pair.open("target", prompt.source)
    model.truncate(0)
    model.prefill(prompt.tokens[:-1])
    tokens = [prompt.tokens[-1]]
    for _ in range(count):
        tokens.append(int(model.forward([tokens[-1]])[-1].largest(1)[0][0]))
        if budget.over and len(tokens) > 8:
            break
    return tokens[1:]


def _near_ties(
    pair: AuditedPair, texts: _GreedyTexts, prompt: AuditPrompt, plain: list[int]
) -> set[int]:
    """Return the positions where the two largest logits are within the noise."""
    logits = pair.scores_after("target", prompt, plain).array()
    top = np.partition(logits, -2, axis=1)[:, -2:]
    margins = np.abs(top[:, 1] - top[:, 0])
    texts.num_positions += len(margins)
    texts.smallest_margin = min(texts.smallest_margin, float(margins.min()))
    ties = {int(i) for i in np.flatnonzero(margins <= 2 * pair.noise.get("target", 0.0))}
    for i in sorted(ties):
        texts.near_ties.append(
            f"{prompt.name}, new token {i}: the two largest logits are {margins[i]:.1e} apart"
        )
    return ties


def _compare(
    texts: _GreedyTexts, name: str, text: Iterable[int], plain: list[int], ties: set[int]
) -> int:
    """Count the tokens that equal plain decoding's, up to the first difference."""
    position = 0
    for token in text:
        if token != plain[position]:
            if position not in ties:
                texts.problems.append(
                    f"{name}, new token {position}: {token} instead of {plain[position]}"
                )
            break
        position += 1
    return position


def _tokens(
    decoder: SpeculativeDecoder, prompt: AuditPrompt, count: int, budget: Budget
) -> Iterator[int]:
    """Yield up to `count` tokens of a greedy text, until the time is up."""
    left = count
    for round_ in decoder.rounds(prompt.tokens, Sampling(), 0, count, source=prompt.source):
        yield from round_.tokens[:left]
        left -= len(round_.tokens)
        if left <= 0 or budget.over:
            return


def coupled(pair: AuditedPair, budget: Budget) -> CheckResult:
    """Compare text sampled with `coupling="gumbel"` at each K with plain decoding of the same seed.

    The texts are equal if passes are batch-invariant; otherwise near-ties of the perturbed logits
    may be decided differently, and differences are reported without failing the check.
    """
    decoders = {k: pair.decoder(k) for k in (0, *pair.ks)}
    num_texts = num_tokens = 0
    differences: list[str] = []
    for seed, prompt in enumerate(pair.prompts):
        if budget.over:
            break
        count = pair.longest(COUPLED_TOKENS)
        short = pair.short_prompt(seed, count)
        plain: list[int] = []
        for k, decoder in decoders.items():
            sampling = Sampling(1.0, noise=GumbelNoise(seed, 0))
            rounds = decoder.rounds(short.tokens, sampling, seed, count, source=short.source)
            text = first_tokens(list(rounds), count)
            if k == 0:
                plain = text
            elif text != plain:
                differences.append(f"{prompt.name}, seed {seed}: K = {k} yields a different text")
            num_tokens += len(text)
        num_texts += 1
    details = {"num_texts": num_texts, "num_tokens": num_tokens, "differences": differences}
    lines = tuple(differences[:10])
    if differences and not pair.noise.get("target"):
        summary = f"{len(differences)} texts of a seed depend on K"
        return CheckResult("coupled", FAILED, summary, lines, details)
    if not num_texts:
        return CheckResult("coupled", SHORT, "no text", lines, details)
    summary = f"{num_texts} texts sampled with coupling=gumbel are the same for {len(decoders)} K"
    if differences:
        summary = f"{len(differences)} texts differ by K, on a device with noise in its logits"
    return CheckResult("coupled", PASSED, summary, lines, details)
