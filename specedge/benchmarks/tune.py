"""Measurement of costs and acceptance rates for `specedge tune`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, median
from typing import cast

import numpy as np

from specedge.bundle import Bundle, store
from specedge.cpu_count import cpu_count
from specedge.errors import ContextLengthError
from specedge.request import DrafterName
from specedge.runtime.backend import self_test
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import has_pool
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.drafters.draft_head import create_drafter
from specedge.runtime.drafters.suffix import Suffix, SuffixBeforeModel, count_accepted
from specedge.runtime.planning import measurement
from specedge.runtime.planning.cost_table import Measurement
from specedge.runtime.planning.measurement import MIN_CONTEXT, PREFILL_LENGTH, Progress
from specedge.runtime.requests import loader
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.history import History
from specedge.runtime.text.tokenizer import encode
from specedge.sampling_options import Sampling

SECONDS = 3.0  # time limit of the sweeps over all passes
SHORT = 32  # shortest measured cache length
TEXT_TOKENS, TEXT_SECONDS = 48, 0.8  # limits of each text used to measure acceptance
DRAFT_TOKENS = 4
TEXTS = (
    "def read_config(path):\n    ",
    "The history of the city began when",
    "import os\nimport sys\n\n\nclass Parser:\n    ",
    "1. First, preheat the oven. 2. Then",
)
MODES = {"greedy": 0.0, "sampled": 1.0}

Accepted = dict[str, list[bool]]  # acceptance of each tested token, by drafter


def measure(pipeline: Pipeline, progress: Progress = lambda share: None) -> Measurement:
    """Measure a full cost table at several lengths of the caches, which are overwritten.

    Raises:
        ContextLengthError: If the context is too short for a draft token.
    """
    context = min(model.context_length for model in pipeline.bundle.models.values())
    if context < MIN_CONTEXT:
        raise ContextLengthError(
            f"tune needs a context of {MIN_CONTEXT} tokens, the pair has {context}, which leaves "
            "no space for draft tokens; 'specedge generate' then uses plain decoding"
        )
    accepted = _run_texts(pipeline, lambda share: progress(share / 4))
    target, entry = cast(OrtModel, pipeline.target), pipeline.bundle.target
    last = max(1, context - PREFILL_LENGTH)
    drafter = None
    if pipeline.draft is not None:
        drafter = create_drafter(pipeline.draft, pipeline.bundle.draft_model)
    try:
        measured = measurement.measure(
            target,
            drafter,
            context,
            max(1, pipeline.max_planned_tokens),
            origin="tune",
            lengths=(min(SHORT, last), last // 2, last),
            seconds=SECONDS,
            on_progress=lambda share: progress((1 + 3 * share) / 4),
        )
    finally:
        pipeline.forget()
    modes = {
        mode: replace(
            measured.costs.mode(mode == "greedy"),
            acceptance={name: fmean(tests) for name, tests in of_mode.items() if tests},
        )
        for mode, of_mode in accepted.items()
    }
    costs = replace(
        measured.costs,
        greedy=modes["greedy"],
        sampled=modes["sampled"],
        invariant_length=self_test.longest_invariant_length(target, entry),
        is_invariant=self_test.agrees_with_export(target, entry),
    )
    return replace(measured, costs=costs)


def _run_texts(pipeline: Pipeline, progress: Progress) -> dict[str, Accepted]:
    """Run built-in texts and return the accepted tokens by mode and drafter."""
    accepted: dict[str, Accepted] = {mode: {} for mode in MODES}
    runs = list(product(TEXTS, MODES))
    for i, (text, mode) in enumerate(runs):
        prompt = _tokens(pipeline, text)
        tokens = _run(pipeline, prompt, MODES[mode], i, accepted[mode])
        accepted[mode].setdefault(DrafterName.SUFFIX, []).extend(
            accepted_copies(
                SuffixBeforeModel(Suffix()),
                [*prompt, *tokens],
                len(prompt),
                pipeline.max_planned_tokens,
            )
        )
        progress((i + 1) / len(runs))
    return accepted


def _run(
    pipeline: Pipeline, prompt: Sequence[int], temperature: float, seed: int, accepted: Accepted
) -> list[int]:
    """Return the tokens of a request, as many as fit into the time limit."""
    until = time.perf_counter() + TEXT_SECONDS
    with pipeline.stream(
        prompt,
        TEXT_TOKENS,
        temperature,
        seed=seed,
        num_draft_tokens=min(DRAFT_TOKENS, max(1, pipeline.max_planned_tokens)),
        drafter=DrafterName.SUFFIX if pipeline.draft is None else DrafterName.MODEL,
        ignore_eos=True,
    ) as stream:
        for _ in stream:
            if time.perf_counter() > until:
                break
    if pipeline.draft is None:
        return stream.generation.tokens
    # Acceptance of later tokens of a block is no estimate of the rate.
    drafted = (round_ for round_ in stream.generation.rounds if round_.num_drafted)
    tests = accepted.setdefault(DrafterName.MODEL, [])
    tests += [round_.num_accepted > 0 for round_ in drafted]
    return stream.generation.tokens


def accepted_copies(
    drafter: Drafter, text: Sequence[int], start: int, max_tokens: int
) -> Iterator[bool]:
    """Yield the acceptance of each tested token of a deterministic drafter along a text.

    It drafts up to `max_tokens` tokens per round from position `start` on.
    """
    at = start
    while at < len(text):
        limit = min(max_tokens, len(text) - at)
        draft = drafter.propose(History(text[:at]), limit, Sampling(), np.zeros(0)).tokens
        accepted, tested = count_accepted(draft, text[at:])
        yield from [True] * accepted + [False] * (tested - accepted)
        at += accepted + 1


def _tokens(pipeline: Pipeline, text: str) -> list[int]:
    """Return a text's tokens that fit into half the context, or token 0 if there are none."""
    target, ids = pipeline.bundle.target, encode(pipeline.tokenizer, text)
    tokens = [token for token in ids if token < target.vocab_size]
    return tokens[: target.context_length // 2] or [0]


LARGE_WEIGHTS = 300_000_000  # bytes of weights above which all cores are used
_REPEATS = 5
_NEW_TOKENS = 48
_DRAFT_LENGTHS = (0, 4)
GAIN = 0.97  # largest ratio of times for which fewer threads are used


def fastest_threads(bundle: str | os.PathLike[str] | None, ops: str) -> int | None:
    """Return the fastest of one thread per core, half as many, and so on.

    Each number has its own sessions, and each text is run with all of them in turn.

    Returns:
        None if one thread per core is the fastest.
    """
    manifest = Bundle.read(store.find_bundle(bundle))
    counts, cores = [], cpu_count()
    while cores:
        counts.append(cores)
        cores //= 2
    size = sum(
        manifest.files[weights].size for weights in {m.weights for m in manifest.models.values()}
    )
    if len(counts) == 1 or size > LARGE_WEIGHTS or has_pool():
        return None
    pipelines = {n: loader.load(bundle, threads=n, ops=ops) for n in counts}
    seconds: dict[tuple[int, int], list[float]] = {
        (n, k): [] for n in counts for k in _DRAFT_LENGTHS
    }
    for i in range(_REPEATS):
        for n in counts[:: -1 if i % 2 else 1]:
            for k in _DRAFT_LENGTHS:
                seconds[n, k].append(_seconds_per_token(pipelines[n], TEXTS[i % len(TEXTS)], k))
    times = {n: min(median(seconds[n, k]) for k in _DRAFT_LENGTHS) for n in counts}
    best = min(times, key=lambda n: times[n])
    return best if times[best] < GAIN * times[counts[0]] else None


def _seconds_per_token(pipeline: Pipeline, text: str, k: int) -> float:
    """Return seconds per token, prefill included."""
    pipeline.forget()
    prompt = _tokens(pipeline, text)
    stats = pipeline.generate(prompt, _NEW_TOKENS, num_draft_tokens=k, ignore_eos=True).stats
    return (stats.prefill_seconds + stats.decode_seconds) / stats.num_new_tokens
