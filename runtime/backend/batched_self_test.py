"""Self-test of passes over several slots, at load: bitwise equality with passes of one slot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specedge.attention_kernels import pass_boundaries
from specedge.bundle import Bundle
from specedge.bundle.batched_signature import BATCHED
from specedge.bundle.manifest import PREFILL_LENGTH, ModelEntry
from specedge.bundle.precision import OLDEST_ONNXRUNTIME
from specedge.diagnosis import packages
from specedge.errors import DeviceError

from ..sampling.logits import Logits
from .batched_model import BatchedSession, OrtBatchedModel
from .buffers import Array
from .kv_cache import KeyValueCache
from .model_session import ModelSession
from .onnx_model import OrtModel
from .ort import onnxruntime
from .self_test import token_steps
from .sessions import Device

PASTS = (PREFILL_LENGTH, 7, 0)  # cache rows before the passes, by text
CHUNKS = (PREFILL_LENGTH, PREFILL_LENGTH // 2, PREFILL_LENGTH // 4)  # tokens of prompts


@dataclass(frozen=True)
class SinglePasses:
    """Passes of one slot over a text whose first `past` tokens are in the cache.

    Attributes:
        tokens: The text, which the longest pass completes.
        past: Cache rows before each pass.
        caches: Cache rows of the text. [H, tokens, D] each
        logits: Logits by pass length. [T, V] each
    """

    tokens: list[int]
    past: int
    caches: list[Array]
    logits: dict[int, Array]


def share_passes(
    bundle: Bundle, entry: ModelEntry, device: Device, models: Sequence[OrtModel]
) -> tuple[list[OrtModel], str | None]:
    """Let the models of all slots share passes, if these are exact on this machine.

    The batched graph then runs every pass. It is opened after the decoder is closed, so that the
    weights are in memory once; `models` are closed.

    Returns:
        The models, whose `batch` is None if requests have to take turns; and a note in that case.
    """
    first = models[0]
    if obstacle := find_obstacle(entry, first.ops):
        return [*models], f"requests take turns, because {obstacle}"
    longest = min(bundle.num_draft_tokens + 1, entry.context_length)
    references = run_single_passes(first, entry, longest)
    ops, lengths, min_length = first.ops, first.invariant_lengths, first.min_length
    for model in models:
        model.close()

    def create_model(session: ModelSession, cache: KeyValueCache | None = None) -> OrtModel:
        session.min_length = min_length
        model = OrtModel(bundle, entry, device, ops, session=session, cache=cache)
        model.invariant_lengths = lengths
        return model

    num_slots = len(models)
    reason = (
        "on this machine passes over several requests are not bitwise equal to those of one "
        f"request (ONNX Runtime {onnxruntime().__version__})"
    )
    try:
        session = BatchedSession(bundle, entry, device, ops)
    except DeviceError as error:
        reason = str(error)
    else:
        batch = OrtBatchedModel(session, num_slots)
        slots = [create_model(session, cache) for cache in batch.caches]
        batch.max_rows, batch.max_logits = exact_rows(batch, slots, references)
        if batch.max_rows:
            for model in slots:
                model.batch = batch
            return slots, None
        for model in slots:
            model.close()
        del session, batch
    first = create_model(ModelSession(bundle, entry, device, ops, "decoder"))
    models = [first, *(first.with_new_cache() for _ in range(num_slots - 1))]
    return models, f"{entry.source.id}: requests take turns, because {reason}"


def find_obstacle(entry: ModelEntry, ops: str) -> str | None:
    """Return the reason why a model has no passes over several slots, if any."""
    version, oldest = onnxruntime().__version__, OLDEST_ONNXRUNTIME["batched"]
    if entry.encoder is not None:
        return "encoder-decoders do not share passes"
    if not entry.has(BATCHED, ops):
        return f"the bundle has no batched graph for the graph variant '{ops}'"
    if packages.version_numbers(version) < packages.version_numbers(oldest):
        return f"batched graphs need ONNX Runtime {oldest} or later, and {version} is installed"
    return None


def run_single_passes(model: OrtModel, entry: ModelEntry, longest: int) -> list[SinglePasses]:
    """Run passes of several lengths over several texts with one slot; empties the cache.

    Mixtures of experts also get texts of equal tokens, which select the same experts.
    """
    boundaries = pass_boundaries(entry.states, model.ops)
    pasts = [*PASTS, *(end - longest for end in boundaries)]
    pasts = [past for past in pasts if 0 <= past <= entry.context_length - longest]
    references = []
    for i, (step, past) in enumerate(itertools.product(token_steps(entry), pasts)):
        tokens = [(3 * i + step * j) % model.vocab_size for j in range(past + longest)]
        logits = {}
        model.truncate(0)
        model.prefill(tokens[:past])
        for length in sorted({1, 2, longest}):
            model.truncate(past)
            logits[length] = model.forward(tokens[past : past + length]).array().copy()
        rows = model.cache_rows(0, model.length)
        references.append(SinglePasses(tokens, past, rows, logits))
    model.truncate(0)
    return references


def exact_rows(
    batch: OrtBatchedModel, models: Sequence[OrtModel], references: Sequence[SinglePasses]
) -> tuple[int, int]:
    """Return the sizes up to which passes over slots are exact; empties their caches.

    Passes vary in the slots that take part, in the number of tokens of each, and in their texts.

    Args:
        batch: The passes.
        models: Models of the slots.
        references: Passes of one slot.

    Returns:
        The most tokens and the most rows of logits of a tested pass; 0 if the rows of a pass are
        not bitwise equal.
    """
    max_tokens = max_logits = 0
    for number, lengths in enumerate(_passes(len(models), [*references[0].logits])):
        texts = [
            # The first text is the longest, for chunks of a prompt.
            references[0] if length < 0 else references[(number + i) % len(references)]
            for i, length in enumerate(lengths)
        ]
        feeds, expected = _feeds(models, texts, lengths)
        num_tokens = sum(len(tokens) for _, tokens, _ in feeds)
        if num_tokens > batch.capacity:
            continue  # RotaryEmbedding rejects more tokens than its tables have rows
        if not _is_exact(models, texts, expected, batch.forward(feeds)):
            return 0, 0
        max_tokens = max(max_tokens, num_tokens)
        max_logits = max(max_logits, sum(num_rows for *_, num_rows in feeds))
    for model in models:
        model.truncate(0)
    return max_tokens, max_logits


def _passes(num_slots: int, lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the number of tokens of each slot, 0 without any, negative for chunks of a prompt."""
    for length in lengths:
        yield [length] * num_slots
        yield [length] + [0] * (num_slots - 1)
    for count in range(1, num_slots + 1):  # others are idle
        some = [lengths[-1 - i % len(lengths)] for i in range(count)] + [0] * (num_slots - count)
        yield some[-count // 2 :] + some[: -count // 2]
    for i, chunk in enumerate(CHUNKS):
        row = [lengths[-1 - i % len(lengths)]] * num_slots
        row[i % num_slots] = -chunk
        yield row


def _feeds(
    models: Sequence[OrtModel], texts: Sequence[SinglePasses], lengths: Sequence[int]
) -> tuple[list[tuple[OrtModel, list[int], int]], list[Array]]:
    """Fill the caches of slots; return the feeds of a pass and the expected logits of each."""
    feeds, expected = [], []
    for model, text, length in zip(models, texts, lengths, strict=True):
        past = 0 if length < 0 else text.past
        model.truncate(0)
        for array, rows in zip(model.cache.arrays.values(), text.caches, strict=True):
            array[0, :, :past] = rows[:, :past]
        model.cache.extend(text.tokens[:past])
        if length:
            num_tokens = model.longest_pass(abs(length))
            num_rows = num_tokens if length > 0 else 0
            feeds.append((model, text.tokens[past : past + num_tokens], num_rows))
            expected.append(text.logits[max(length, 1)][:num_rows])
    return feeds, expected


def _is_exact(
    models: Sequence[OrtModel],
    texts: Sequence[SinglePasses],
    expected: Sequence[Array],
    results: Sequence[Logits | None],
) -> bool:
    """Return True if logits and cache rows of a pass are those of passes of one slot."""
    is_equal = all(
        result is None or np.array_equal(logits, result.array())
        for logits, result in zip(expected, results, strict=True)
    )
    return is_equal and all(
        np.array_equal(actual, rows[:, : model.length])
        for model, text in zip(models, texts, strict=True)
        for actual, rows in zip(model.cache_rows(0, model.length), text.caches, strict=True)
    )
