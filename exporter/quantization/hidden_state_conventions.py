"""Acceptance rates of a draft head for each of the hidden states that it may have been trained for.

Published sources disagree whether some heads read hidden states before or after a norm. A wrong
convention shows in acceptance rates alone, so they are measured in PyTorch, in one pass of the
target over a few texts. T tokens, C columns of the head, V vocabulary entries; F channels of hidden
states, H of those that the head's passes read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from specedge.errors import ExportError

from .. import internals
from ..checkpoint.draft_heads import DraftHeadConfig
from ..checkpoint.loader import LoadedCheckpoint
from ..tracing.hidden_states import HiddenStateRecorder
from ..verification.exact_model import eager_passes
from .draft_acceptance import acceptance_by_row, first_windows, rates_by_position
from .texts import TextEncoder, TextSource

NUM_TOKENS = 64  # of each text


@dataclass(frozen=True)
class MeasuredConvention:
    """Acceptance rates at temperature 1 of first draft tokens, and of second ones after them."""

    config: DraftHeadConfig
    first: float
    second: float

    @property
    def num_accepted(self) -> float:
        """Expected number of accepted tokens in drafts of two."""
        return self.first * (1 + self.second)

    def describe(self) -> str:
        """Describe the convention and its rates."""
        return f"{self.first:.0%} and {self.second:.0%} {self.config.convention}"


def measure_conventions(
    target: LoadedCheckpoint,
    draft: LoadedCheckpoint,
    conventions: Sequence[DraftHeadConfig],
    source: TextSource,
    tokenizer: Path,
    num_tokens: int,
    context_length: int,
) -> list[MeasuredConvention]:
    """Measure the acceptance rates of each convention on a few short texts.

    Args:
        target: The target.
        draft: The draft head.
        conventions: Its configs with the hidden states that it may have been trained for.
        source: Texts, of which the calibration documents are used.
        tokenizer: Path of tokenizer.json.
        num_tokens: Number of the tokenizer's ids.
        context_length: Context length of both models.

    Returns:
        The rates in the same order, none if the texts are too short.
    """
    model: Any = target.model
    num_tokens = min(num_tokens, model.get_input_embeddings().num_embeddings)
    encoder = TextEncoder(Tokenizer.from_file(str(tokenizer)), num_tokens)
    texts = first_windows(encoder, source.calibration, min(NUM_TOKENS, context_length))
    layers = sorted({layer for convention in conventions for layer in convention.hidden.layers})
    acceptance: list[list[np.ndarray]] = [[] for _ in conventions]
    for text in texts:
        tokens = torch.from_numpy(text)[None]
        with _running(target, layers) as recorder:
            logits = model(input_ids=tokens, use_cache=False).logits[0].numpy()
        states = dict(zip(layers, recorder.take(), strict=True))
        for convention, rows in zip(conventions, acceptance, strict=True):
            hidden = torch.cat([states[layer] for layer in convention.hidden.layers], -1)
            first, second = draft_two(draft, convention.returned_layer, tokens, hidden)
            first_rates = acceptance_by_row(first[:-1], logits[1:-1], draft.token_ids)[1]
            second_rates = acceptance_by_row(second, logits[2:], draft.token_ids)[1]
            rows.append(np.stack((first_rates, second_rates), 1))
    return [
        MeasuredConvention(convention, *map(float, rates_by_position(np.concatenate(rows))[0]))
        for convention, rows in zip(conventions, acceptance, strict=True)
        if rows
    ]


def draft_two(
    draft: LoadedCheckpoint, returned_layer: int, tokens: torch.Tensor, hidden: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of first draft tokens of a text, and of second ones after its tokens.

    Row i of the first reads the hidden state of token i and token i + 1. Row i of the second reads
    the state that this row returned and token i + 2, and attends to the first ones up to it.

    Args:
        draft: The draft head.
        returned_layer: Layer of the head whose states the second rows read.
        tokens: Tokens of the text. [1, T]
        hidden: Hidden states of the target. [1, T, F]

    Returns:
        [T - 1, C] and [T - 2, C]
    """
    model: Any = draft.model
    num_first, num_second = tokens.shape[1] - 1, tokens.shape[1] - 2
    visible = torch.eye(num_first + num_second, dtype=torch.bool)
    visible[:num_first, :num_first] = visible.new_ones(num_first, num_first).tril()
    visible[num_first:, :num_first] = visible.new_ones(num_second, num_first).tril()
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    def run(ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        output = model.model(
            inputs_embeds=model.join(model.model.embed_tokens(ids), states),
            position_ids=positions[None],
            attention_mask=mask[None, None, :length, :length],
            use_cache=False,
        )
        return output.last_hidden_state

    with _running(draft, [returned_layer]) as recorder:
        fused, positions = model.fuse(hidden[:, :-1]), torch.arange(num_first)
        first = run(tokens[:, 1:], fused, positions)
        (returned,) = recorder.take()
        both = run(
            torch.cat((tokens[:, 1:], tokens[:, 2:]), 1),
            torch.cat((fused, returned[:, :-1]), 1),
            torch.cat((positions, positions[1:])),
        )
        logits = model.lm_head(torch.cat((first, both[:, num_first:]), 1))[0].numpy()
    return logits[:num_first], logits[num_first:]


@contextlib.contextmanager
def _running(loaded: LoadedCheckpoint, layers: Sequence[int]) -> Iterator[HiddenStateRecorder]:
    """Run a model in float32 and record hidden states while the context lasts."""
    model, recorder = loaded.model, HiddenStateRecorder(loaded.model, layers)
    failure = internals.translate_internal_errors(ExportError, "a model cannot be run in PyTorch")
    with failure, eager_passes(model, loaded.sources), recorder.recorded():
        yield recorder
