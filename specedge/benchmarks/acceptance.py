"""Acceptance rate alpha along texts that the target generated.

Leviathan et al. 2023 define alpha as the mean probability over positions that a draft token is
accepted. Both models read plain decoding's tokens and their distributions are compared at each
position, so the result does not depend on K, the drafter or random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from specedge.errors import OptionError
from specedge.runtime.decoding.protocols import (
    DraftHeadModel,
    HiddenStateModel,
    LanguageModel,
    open_source,
    run_operations,
)
from specedge.runtime.drafters.draft_head import create_drafter
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits, Row
from specedge.runtime.sampling.probabilities import greedy_token, probabilities
from specedge.runtime.sampling.source import Source
from specedge.sampling_options import Sampling

from ..theory.formulas import acceptance_probability

ROWS = 16  # rows of logits at a time; a row may have 150,000 columns


def acceptances(
    pipeline: Pipeline,
    prompt: Sequence[int],
    text: Sequence[int],
    sampling: Sampling,
    source: Source | None = None,
) -> list[float]:
    """Return the acceptance probability of the draft model's token at each position. -> [n]

    It is the sum over tokens of min(t, d); at temperature 0 it is 1 if both choose the same token
    and otherwise 0. The list ends with the draft's context. It is empty without a draft model, and
    for one that drafts all tokens of a round in one pass, whose rates depend on the position. Both
    caches are overwritten. The text of an encoder-decoder has a `source`. A draft head reads states
    of the target alone, as for the first token of a draft; its prompts have at least two tokens.
    """
    sizes = pipeline.bundle.draft
    if pipeline.draft is None or sizes is None or sizes.mask_token is not None:
        return []
    if sizes.reads_hidden and len(prompt) < 2:
        return []
    model = create_drafter(pipeline.draft, sizes, pipeline.bundle.readings())
    run_operations(open_source(pipeline.target, source))
    run_operations(open_source(pipeline.draft, model.readable_source(source)))
    tokens = [*prompt, *text[:-1]]
    history = History(prompt)
    rates = []
    tokens_read = model.reading.read(tokens, 0)[: sizes.context_length]
    lengths = range(len(prompt), len(tokens) + 1)
    drafts: Iterable[Row]
    if sizes.reads_hidden:
        models = cast(HiddenStateModel, pipeline.target), cast(DraftHeadModel, pipeline.draft)
        drafts = [*_head_rows(*models, tokens_read, len(prompt))]
    else:
        drafts = _rows(model.model, tokens_read, [*map(model.reading.length, lengths)])
    targets = _rows(pipeline.target, tokens, lengths)
    for token, target, draft in zip(text, targets, drafts, strict=False):
        rates.append(_acceptance(target, draft, sampling, history))
        history.extend([token])
    return rates


def _acceptance(target: Row, draft: Row, sampling: Sampling, history: History) -> float:
    size = len(target.array())
    try:
        if sampling.greedy:
            token = greedy_token(draft, sampling, history)
            return float(token == greedy_token(target, sampling, history))
        drafted = probabilities(draft.array(), sampling, history, draft.ids).row(size)
    except OptionError:  # the options exclude the draft's whole vocabulary
        return 0.0
    expected = probabilities(target.array(), sampling, history).row(size)
    return acceptance_probability(expected, drafted)


def _head_rows(
    target: HiddenStateModel, head: DraftHeadModel, tokens: Sequence[int], prompt_length: int
) -> Iterator[Row]:
    """Yield the logits of a draft head for the tokens after the prompt."""
    first = prompt_length - 2
    target.truncate(0)
    head.truncate(0)
    for at in range(0, len(tokens) - 1, ROWS):
        target.forward(tokens[at : at + ROWS], 1)
        following = tokens[at + 1 : at + 1 + ROWS]
        states = head.fuse(target.hidden[: len(following)])
        if at + len(following) <= first:
            head.prefill(following, states)
            continue
        logits = head.forward(following, None, states)
        kept = Logits(logits.array().copy(), logits.ids)
        yield from (kept[i] for i in range(max(0, first - at), len(following)))


def _rows(model: LanguageModel, tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[Row]:
    """Yield the logits after the first n tokens for each n in `lengths`, which ascend."""
    start, selected = lengths[0] - 1, {*lengths}
    model.truncate(0)
    model.prefill(tokens[:start])
    for at in range(start, len(tokens), ROWS):
        logits = model.forward(tokens[at : at + ROWS])
        kept = Logits(logits.array().copy(), logits.ids)
        count = len(tokens[at : at + ROWS])
        yield from (kept[i] for i in range(count) if at + i + 1 in selected)
