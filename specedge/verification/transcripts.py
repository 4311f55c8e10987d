"""Conformance vectors (golden transcripts) for hosts of a bundle's round graphs.

Prompts and seeds are selected so that no decision has a small margin: a host whose logits differ by
rounding, as with another version of ONNX Runtime, generates the same tokens. K draft tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any, cast

from specedge.bundle import Bundle
from specedge.bundle.signature import SAMPLING_SETTINGS
from specedge.errors import ContextLengthError, PromptError
from specedge.request import PLAIN
from specedge.runtime.backend.ort import onnxruntime
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.observed_states import Array
from specedge.runtime.decoding.protocols import (
    Drafter,
    Feed,
    LanguageModel,
)
from specedge.runtime.decoding.random_numbers import uniforms
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import Draft, Verdict, verify
from specedge.runtime.drafters.draft_head import create_drafter
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.requests.loader import load
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.distribution import Floats
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits, Row
from specedge.runtime.text.bad_words import apply_defaults
from specedge.runtime.text.tokenizer import decode
from specedge.sampling_options import Sampling
from specedge.verification.margins import (
    FilteredRow,
    VerifiedDraft,
    filter_row,
    greedy_margin,
    sample_margin,
)

from ..benchmarks.prompts import SETS
from .audited_pair import Wrapper

LENGTH = 32  # new tokens
MAX_TRIES = 64
SETTINGS = (
    Sampling(),
    Sampling(),
    Sampling(temperature=0.8, top_k=20),
    Sampling(temperature=1.0, top_k=20, top_p=0.9),
    Sampling(temperature=1.0, top_k=20, min_p=0.05, repetition_penalty=1.2),
)
# Ten times the measured difference of float logits between ONNX Runtime 1.28 and 1.32. int8 logits
# are bitwise identical from 1.30 on; where a byte rounds differently they differ by 0.3, which no
# transcript can tolerate.
LEAST_MARGIN = 6e-4


@dataclass(frozen=True)
class Transcript:
    """Request and its tokens; `num_accepted` and `margins` have one entry per round.

    A margin is the smallest change of the logits that could change a decision of the round. The
    prompt of an encoder-decoder is its source; texts begin with the bundle's decoder tokens.
    """

    prompt: str
    prompt_tokens: list[int]
    num_draft_tokens: int
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    tokens: list[int]
    num_accepted: list[int]
    text: str
    margins: list[float]


def transcripts(bundle: Bundle, ks: Sequence[int]) -> str:
    """Return the text of golden.json: every item of `SETTINGS` for each K.

    Raises:
        SpecEdgeError: The bundle cannot be loaded here.
    """
    pipeline = load(bundle.folder)
    items = [_best(pipeline, k, i) for k in ks for i in range(len(SETTINGS))]
    value = {
        "onnxruntime": str(onnxruntime().__version__),
        "transcripts": [asdict(transcript) for transcript in items],
    }
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def _best(pipeline: Pipeline, k: int, index: int) -> Transcript:
    """Return the first transcript with sufficient margins, else the longest prefix with them."""
    sampling, longest = SETTINGS[index], (0, "", list[int](), 0)
    for prompt, tokens, seed in islice(_requests(pipeline, index), MAX_TRIES):
        first, _ = pipeline.prompts.start(tokens)
        length = min(LENGTH, pipeline.bundle.context_length - len(first))
        transcript = _transcript(pipeline, prompt, tokens, k, sampling, seed, length)
        if transcript.margins[-1] > LEAST_MARGIN:
            return transcript
        wide = sum(n + 1 for n in transcript.num_accepted[:-1])
        longest = max(longest, (wide, prompt, tokens, seed))
    length, prompt, tokens, seed = longest
    return _transcript(pipeline, prompt, tokens, k, sampling, seed, max(1, length))


def _requests(pipeline: Pipeline, index: int) -> Iterator[tuple[str, list[int], int]]:
    """Yield prompts and seeds to try: prompts at temperature 0, seeds above it."""
    texts = [text for texts in SETS.values() for text in texts]
    texts = texts[index:] + texts[:index]
    if SETTINGS[index].greedy:
        texts += [text[len(text) // 3 :] for text in texts]
        yield from ((*_short(pipeline, text), 0) for text in texts)
        return
    prompt, tokens = _short(pipeline, texts[0])
    yield from ((prompt, tokens, seed) for seed in count(index))


def _short(pipeline: Pipeline, text: str) -> tuple[str, list[int]]:
    """Return a prefix of a text of at most half the longest prompt, and its tokens."""
    longest = pipeline.bundle.max_prompt_length
    while True:
        with suppress(ContextLengthError):
            tokens = pipeline.prompts.tokens(text)
            if len(tokens) <= max(1, min(64, (longest + 1) // 2)):
                return text, tokens
        if len(text) < 2:
            raise PromptError(f"no prompt has at most {longest} tokens")
        text = text[: len(text) // 2]


def _transcript(
    pipeline: Pipeline,
    prompt: str,
    tokens: list[int],
    k: int,
    sampling: Sampling,
    seed: int,
    length: int,
) -> Transcript:
    """Return the transcript of a request, up to the first round with an insufficient margin."""
    bundle = pipeline.bundle
    first, source = pipeline.prompts.start(tokens)
    sampling = apply_defaults(sampling, bundle.decoding_defaults)
    listener = _Listener(pipeline.draft, k, seed, bundle.target.vocab_size)
    drafter: Drafter = _NoDrafts()
    if sizes := bundle.draft:
        drafter = create_drafter(listener, sizes)
    decoder = SpeculativeDecoder(
        pipeline.target, FixedPlan(drafter, k), Stopwatch(), max_length=bundle.context_length
    )
    decoder.accept_rule = listener.accept_rule
    new: list[int] = []
    accepted: list[int] = []
    for round_ in decoder.rounds(first, sampling, seed, length, source=source):
        accepted.append(min(round_.num_accepted, length - len(new)))
        new += round_.tokens
        if ends := [i for i, token in enumerate(new) if token in bundle.end_tokens]:
            new = new[: ends[0] + 1]
            break
        if listener.margins[-1] <= LEAST_MARGIN:
            break
    new = new[:length]
    settings: dict[str, Any] = {name: getattr(sampling, name) for name in SAMPLING_SETTINGS}
    return Transcript(
        prompt=prompt,
        prompt_tokens=tokens,
        num_draft_tokens=k,
        max_new_tokens=length,
        seed=seed,
        tokens=new,
        num_accepted=accepted,
        text=decode(pipeline.tokenizer, new),
        margins=listener.margins,
        **settings,
    )


class _NoDrafts(Drafter):
    """Drafter that proposes nothing."""

    name = PLAIN

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        return Draft([])


class _Listener(Wrapper):
    """Draft model that records its rows, and an accept rule that computes margins from them."""

    has_draft_graphs = False  # which return no rows

    def __init__(self, model: LanguageModel | None, k: int, seed: int, vocab_size: int) -> None:
        super().__init__(model)
        self._k, self._seed, self._vocab_size = k, seed, vocab_size
        self._rows: list[Row] = []
        self.margins: list[float] = []

    def forward(
        self, tokens: Sequence[int], num_rows: int | None = None, hidden: Array | None = None
    ) -> Logits:
        num_rows = len(tokens) if num_rows is None else num_rows
        logits = cast(Logits, Feed(self._wrapped, tokens, num_rows, hidden).run())
        row = logits[-1]
        self._rows.append(Row(row.array().copy(), row.ids))
        return logits

    def accept_rule(
        self,
        draft: Draft,
        logits: Logits,
        sampling: Sampling,
        history: History,
        accept_uniforms: Floats,
        last_uniform: float,
        is_block: bool = False,
    ) -> Verdict:
        arguments = draft, logits, sampling, history, accept_uniforms, last_uniform, is_block
        verdict = verify(*arguments)
        rows, self._rows = self._rows, []
        assert len(rows) == len(draft.tokens)
        texts = [history.then(draft.tokens[:i]) for i in range(len(rows) + 1)]
        steps = list(zip(rows, texts[:-1], strict=True))
        if sampling.greedy:
            tests = [(logits[i], texts[i]) for i in range(verdict.num_accepted + 1)]
            margins = [greedy_margin(row, sampling, text) for row, text in steps + tests]
            self.margins.append(min(margins))
            return verdict
        temperature = sampling.temperature
        draws = uniforms(self._seed, len(self.margins) * (2 * self._k + 1), len(rows))
        drafted = [self._filter(row, text, sampling) for row, text in steps]
        margins = [
            min(row.filter_margin, sample_margin(row.probs, float(draw), temperature))
            for row, draw in zip(drafted, draws, strict=True)
        ]
        targets = [self._filter(logits[i], text, sampling) for i, text in enumerate(texts)]
        judged = VerifiedDraft(
            draft.tokens, drafted, targets, accept_uniforms, last_uniform, temperature
        )
        self.margins.append(min([*margins, judged.margin(verdict)]))
        return verdict

    def _filter(self, row: Row, text: History, sampling: Sampling) -> FilteredRow:
        return filter_row(row, sampling, text, self._vocab_size)
