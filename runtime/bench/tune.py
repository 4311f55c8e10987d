"""Measures what a loaded pair costs on this device, and how often its draft is right.

A pass is timed amid the rounds of requests: alone it would find other things in the processor's
caches, and threads that are awake.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, product
from math import inf, nan
from statistics import fmean, median
from typing import Any

import numpy as np

from specedge.errors import ContextLengthError
from specedge.options import MAX_EXPORTED_DRAFT_TOKENS, Sampling
from specedge.request import DrafterName

from ..drafters.prompt_lookup import Lookup, agreeing
from ..drafters.suffix import Suffix
from ..loop.round import Drafter
from ..pipeline import Pipeline
from ..planning.cost_table import READ_LENGTH, ROW, CostTable, ModeCosts, typical
from ..planning.known_costs import Seen
from ..sampling.distribution import Floats
from ..sampling.history import History
from ..text.tokenizing import encode
from .fitting import fitted

DRAFT_TOKENS = (*range(9), MAX_EXPORTED_DRAFT_TOKENS)  # a line through 5 and 9 rows was 4% off
EVERYWHERE = (0, 4)  # and the most: K that are timed at each length and in each mode
SECONDS = 4.0  # slow models take longer
LEAST_ROUNDS, MOST_ROUNDS = 4, 24  # of a request; the fewer, the slower the target
LEAST_CONTEXT = 3  # tokens: of the prompt, drafted, and the target's own
BUSY = 1.5  # from so many times the least seconds of a pass on, others had the cores
TEXT_TOKENS, TEXT_SECONDS = 48, 0.8  # of each text that tells the acceptance, whichever is less
TEXTS = (
    "def read_config(path):\n    ",
    "The history of the city began when",
    "import os\nimport sys\n\n\nclass Parser:\n    ",
    "1. First, preheat the oven. 2. Then",
)
MODES = {"greedy": 0.0, "sampled": 1.0}

Progress = Callable[[float], None]  # told which share of the work is done
Place = tuple[str, int, int]  # mode, K, and the tokens before the first round
Copies = dict[str, list[bool]]  # by drafter, whether each token that it tested was accepted


@dataclass(frozen=True)
class Tuning:
    """A full table; `busy` if so much else ran that it is better measured again."""

    costs: CostTable
    busy: bool


def measure(pipeline: Pipeline, progress: Progress = lambda share: None) -> Tuning:
    """Time rounds of every kind. The pipeline's caches are overwritten.

    Raises ContextLengthError for a pair in whose context no draft token fits.
    """
    lengths, ks = _lengths_and_ks(pipeline)
    texts, copies = _run_texts(pipeline, ks, lambda share: progress(share / 4))
    seconds = typical(list(chain(*(s for x in texts["greedy"] for s in x.target.values()))))
    seen, reading = _run_rounds(
        pipeline, lengths, ks, seconds, lambda share: progress((1 + 3 * share) / 4)
    )
    passes = {place: _all(one.target[place[1] + 1] for one in some) for place, some in seen.items()}
    drafts = {place: _drafted(some, place[1]) for place, some in seen.items() if place[1]}
    target, draft = _fit(passes, lengths, ks), _fit(drafts, lengths, ks[1:])
    modes = {}
    for i, mode in enumerate(MODES):
        modes[mode] = ModeCosts(
            target=tuple(map(tuple, target[i].tolist())),
            draft=tuple(map(tuple, draft[i].tolist())),
            pending=tuple((_more_for_two(texts[mode]) * draft[i, :, 0]).tolist()),
            reading=tuple(map(typical, reading)),
            host=_hosts(seen, mode, ks),
            acceptance=_acceptance(texts[mode], copies[mode]),
        )
    busy = fmean(median(some) / min(some) for some in passes.values()) > BUSY
    return Tuning(CostTable("tune", lengths, tuple(k + 1 for k in ks), **modes, threads=0), busy)


def _fit(found: dict[Place, list[float]], lengths: Sequence[int], ks: Sequence[int]) -> Floats:
    """What was timed, all together. -> [modes, lengths, K]"""
    seconds = [
        [[typical(found.get((m, k, at), [nan])) for k in ks] for at in lengths] for m in MODES
    ]
    return fitted(np.array(seconds))


def _hosts(seen: dict[Place, list[Seen]], mode: str, ks: Sequence[int]) -> tuple[float, ...]:
    """The host's seconds of a round by K, of which more never cost less."""
    timed: dict[int, list[float]] = {}
    for (where, k, _), some in seen.items():
        if where == mode:
            timed.setdefault(k, []).extend(one.host for one in some)
    known = sorted(timed)
    hosts = np.interp(ks, known, [median(timed[k]) for k in known])
    return tuple(accumulate(hosts.tolist(), max))


def _lengths_and_ks(pipeline: Pipeline) -> tuple[tuple[int, ...], list[int]]:
    """The numbers of tokens in the caches, and the K, to time rounds with."""
    context = min(model.context_length for model in pipeline.bundle.models.values())
    if context < LEAST_CONTEXT:
        raise ContextLengthError(
            f"tune needs a context of {LEAST_CONTEXT} tokens, the pair has {context}, which leaves "
            "no room for draft tokens; generate decodes without them there"
        )
    most = min(pipeline.max_planned_tokens, max(1, context // 4))
    last = max(1, context - READ_LENGTH)
    lengths = tuple(sorted({min(32, last), -(-last // 2), last}))
    return lengths, sorted({*(k for k in DRAFT_TOKENS if k <= most), most})


def _places(lengths: Sequence[int], ks: Sequence[int]) -> list[Place]:
    """Every K in greedy rounds at the middle length, and a few everywhere else."""
    middle = lengths[len(lengths) // 2]
    return [
        (mode, k, length)
        for mode, k, length in product(MODES, ks, lengths)
        if k in (*EVERYWHERE, ks[-1]) or (mode, length) == ("greedy", middle)
    ]


def _run_texts(
    pipeline: Pipeline, ks: list[int], progress: Progress
) -> tuple[dict[str, list[Seen]], dict[str, Copies]]:
    """Speculative requests on built-in texts, and what became of copies, by mode."""
    found: dict[str, list[Seen]] = {mode: [] for mode in MODES}
    copies: dict[str, Copies] = {mode: {one.name: [] for one in _copying()} for mode in MODES}
    runs = list(product(TEXTS, MODES))
    unlearning = _apart(pipeline, pipeline.target, pipeline.draft)
    for i, (text, mode) in enumerate(runs):
        prompt = _tokens(pipeline, text)[: pipeline.bundle.context_length // 2]
        seen, tokens = _run(unlearning, prompt, mode, min(4, max(ks)), i, seconds=TEXT_SECONDS)
        found[mode].append(seen)
        for drafter in _copying():
            copies[mode][drafter.name] += accepted_copies(
                drafter, [*prompt, *tokens], len(prompt), max(ks)
            )
        progress((i + 1) / len(runs))
    return found, copies


def _copying() -> list[Drafter]:
    """Those that draft from the text, in which every drafter is to begin anew."""
    return [Lookup(), Suffix(before_model=True)]


def accepted_copies(
    drafter: Drafter, text: Sequence[int], start: int, max_tokens: int
) -> Iterator[bool]:
    """Whether each token is accepted that a drafter alone would have tested, had it drafted up to
    so many a round from `start` on.
    """
    at = start
    while at < len(text):
        most = min(max_tokens, len(text) - at)
        copy = drafter.propose(History(text[:at]), most, Sampling(), np.zeros(0)).tokens
        accepted, tested = agreeing(copy, text[at:])
        yield from [True] * accepted + [False] * (tested - accepted)
        at += accepted + 1


def _run_rounds(
    pipeline: Pipeline,
    lengths: tuple[int, ...],
    ks: list[int],
    seconds: float,
    progress: Progress,
) -> tuple[dict[Place, list[Seen]], list[list[float]]]:
    """Rounds at every place, all in turn, so that a busy moment slows none alone; and what a token
    costs that the draft reads, by length. A pass of the target takes about `seconds`.
    """
    unread = _apart(pipeline, _Unread(pipeline.target), _Unread(pipeline.draft))
    text = _tokens(pipeline, "".join(TEXTS))
    places = _places(lengths, ks)
    each = SECONDS / 2 / len(places) / (2 * seconds)  # rounds in half the time, drafts as dear
    num_rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(each)))
    found: dict[Place, list[Seen]] = {place: [] for place in places}
    reading: list[list[float]] = [[] for _ in lengths]
    try:
        begin, sweeps, share = time.perf_counter(), 0, 0.0
        while share < 1:
            for i, (mode, k, length) in enumerate(places):
                prompt = (text * (length // len(text) + 1))[:length]
                found[mode, k, length].append(_run(unread, prompt, mode, k, i, num_rounds)[0])
                done = sweeps + (i + 1) / len(places)
                share = min(1.0, done, (time.perf_counter() - begin) / SECONDS)
                progress(share)
            sweeps += 1
            for took, length in zip(reading, lengths, strict=True):
                room = pipeline.bundle.draft.context_length - length
                took.append(_read(pipeline.draft, length, min(READ_LENGTH, room)))
    finally:
        pipeline.forget()  # no row is what its token says
    return found, reading


def _apart(pipeline: Pipeline, target: Any, draft: Any) -> Pipeline:
    """One that learns nothing, and whose first pass reads no prompt: it is timed as others are."""
    made = Pipeline(pipeline.bundle, pipeline.tokenizer, target, draft)
    made.max_first_length = 1
    return made


class _Unread:
    """A model that takes a prompt for read: what is in its cache changes the cost of no pass."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._model.cache.extend(tokens)


def _run(
    pipeline: Pipeline,
    prompt: Sequence[int],
    mode: str,
    k: int,
    seed: int,
    num_rounds: int = TEXT_TOKENS,
    seconds: float = inf,
) -> tuple[Seen, list[int]]:
    """A request of so many rounds, or of what fits into a time."""
    until = time.perf_counter() + seconds
    with pipeline.stream(
        prompt,
        TEXT_TOKENS if seconds < inf else num_rounds * (k + 1),
        MODES[mode],
        seed=seed,
        num_draft_tokens=k,
        drafter=DrafterName.MODEL,
        ignore_eos=True,
    ) as stream:
        for _ in stream:
            if stream.num_rounds >= num_rounds or time.perf_counter() > until:
                break
    return stream.seen, stream.generation.tokens


def _tokens(pipeline: Pipeline, text: str) -> list[int]:
    """A text's tokens, or any where a tokenizer knows none of it: costs do not depend on them."""
    ids = encode(pipeline.tokenizer, text)
    return [token for token in ids if token < pipeline.bundle.target.vocab_size] or [0]


def _read(model: Any, length: int, num_tokens: int) -> float:
    """Seconds of a token that is read after so many."""
    model.truncate(0)
    model.cache.extend([0] * length)
    begin = time.perf_counter()
    model.prefill([0] * num_tokens)
    return (time.perf_counter() - begin) / num_tokens


def _drafted(some: list[Seen], k: int) -> list[float]:
    """Seconds of the draft passes of a round of k tokens. Where the first is mostly over two
    tokens, as with a draft that is always right, over two: a request's first round is a cold one.
    """
    one, two = (_all(seen.draft.get((first, k), ()) for seen in some) for first in (1, 2))
    return max(one, two, key=len)


def _more_for_two(some: list[Seen]) -> float:
    """What a round's first draft pass takes more over two tokens than over one, of the latter."""
    one, two = (_all(seen.firsts.get(tokens, ()) for seen in some) for tokens in (1, 2))
    return max(0.0, typical(two) / typical(one) - 1) if one and two else ROW


def _acceptance(texts: list[Seen], copies: Copies) -> dict[str, float]:
    """The chance that a token of the draft model is accepted, and that one of a copy would have."""
    accepted = sum(seen.num_accepted for seen in texts)
    tested = sum(seen.num_tested for seen in texts)
    found: dict[str, float] = {DrafterName.MODEL: accepted / max(1, tested)}
    return found | {name: fmean(tested) for name, tested in copies.items() if tested}


def _all(found: Iterable[Sequence[float]]) -> list[float]:
    """Of all requests together, without their beginnings, where the processor's caches are cold."""
    return [seconds for one in found for seconds in one[-(-len(one) // 4) :] or one]
