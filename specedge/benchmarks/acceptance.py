"""Acceptance rate alpha along texts that the target generated.

Leviathan et al. 2023 define alpha as the mean probability over positions that a draft token is
accepted. Both models read plain decoding's tokens and their distributions are compared at each
position, so the result does not depend on K, the drafter or random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specedge.errors import OptionError
from specedge.runtime.decoding.protocols import LanguageModel, open_source, run_operations
from specedge.runtime.drafters.draft_model import DraftModel
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
    caches are overwritten. The text of an encoder-decoder has a `source`.
    """
    sizes = pipeline.bundle.draft
    if pipeline.draft is None or sizes is None or sizes.mask_token is not None:
        return []
    model = DraftModel.from_entry(pipeline.draft, sizes, pipeline.bundle.readings())
    run_operations(open_source(pipeline.target, source))
    run_operations(open_source(pipeline.draft, model.readable_source(source)))
    tokens = [*prompt, *text[:-1]]
    read = model.reading.read(tokens, 0)[: sizes.context_length]
    lengths = range(len(prompt), len(tokens) + 1)
    targets = _rows(pipeline.target, tokens, lengths)
    drafts = _rows(model.model, read, [*map(model.reading.length, lengths)])
    history = History(prompt)
    rates = []
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
