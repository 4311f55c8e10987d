"""N-gram drafter: counts of the successors of one and two tokens, and drafts from them.

Notation: V vocabulary entries; B distinct pairs of tokens; N distinct triples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.sampling_options import Sampling

from ..decoding.protocols import Drafter
from ..decoding.verification import Draft, DraftRequest, draw_draft
from ..sampling.distribution import Distribution, Floats, Ids
from ..sampling.history import History
from ..sampling.logits import Row

Counts = NDArray[np.unsignedinteger[Any]]
MAX_ORDER = 3
MAX_VOCAB_SIZE = 2**21


@dataclass(frozen=True)
class NGramTables:
    """Counts of single tokens, pairs and triples, sorted, successors ascending within a row.

    `unigrams` [V] are counts. Token a's successors are the pairs `pair_starts[a]` to
    `pair_starts[a + 1]` of `pair_tokens` [B] and `pair_counts` [B]; those of pair j the triples
    `triple_starts[j]` to `triple_starts[j + 1]` of `triple_tokens` [N] and `triple_counts` [N].
    Tables of lower order have no triples, or no pairs either.
    """

    unigrams: Counts
    pair_starts: Counts
    pair_tokens: Counts
    pair_counts: Counts
    triple_starts: Counts
    triple_tokens: Counts
    triple_counts: Counts

    @property
    def vocab_size(self) -> int:
        """Number of vocabulary entries."""
        return len(self.unigrams)

    def distribution(self, before: Sequence[int]) -> Distribution:
        """Return the distribution after a text, in time linear in its last token's successors.

        Triples and pairs are interpolated by Witten and Bell's rule: a context of c tokens and d
        distinct successors has weight c / (c + d). An unseen context backs off to the shorter one,
        at last to the tokens' frequencies. The probabilities of seen successors add up to 1.
        """
        row = self._successors(self.pair_starts, before[-1]) if before else slice(0, 0)
        if row.start == row.stop:
            return self._unigram_distribution
        ids = self.pair_tokens[row].astype(np.intp)
        probs = self.pair_counts[row] / self.pair_counts[row].sum(dtype=np.float64)
        triples = self._triples(before)
        if triples.start != triples.stop:
            counts = self.triple_counts[triples]
            total = counts.sum(dtype=np.float64)
            probs *= len(counts) / (total + len(counts))
            probs[ids.searchsorted(self.triple_tokens[triples])] += counts / (total + len(counts))
        return Distribution(probs, ids)

    @cached_property
    def _unigram_distribution(self) -> Distribution:
        ids: Ids = self.unigrams.nonzero()[0]
        counts = self.unigrams[ids]
        return Distribution(counts / counts.sum(dtype=np.float64), ids)

    def _triples(self, before: Sequence[int]) -> slice:
        """Return the range of the successors of the last two tokens."""
        if len(before) < 2:
            return slice(0, 0)
        row = self._successors(self.pair_starts, before[-2])
        at = row.start + int(self.pair_tokens[row].searchsorted(before[-1]))
        if at == row.stop or self.pair_tokens[at] != before[-1]:
            return slice(0, 0)
        return self._successors(self.triple_starts, at)

    @staticmethod
    def _successors(starts: Counts, at: int) -> slice:
        return slice(int(starts[at]), int(starts[at + 1]))


def count(texts: Iterable[Sequence[int]], vocab_size: int, order: int = MAX_ORDER) -> NGramTables:
    """Count the n-grams, n up to `order`, within token texts, in about 60 bytes per token.

    Raises:
        ValueError: The texts are empty, or three tokens of the vocabulary do not fit into 64 bits.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(
            f"n-grams support at most {MAX_VOCAB_SIZE} vocabulary entries, got {vocab_size}"
        )
    unigrams = np.zeros(vocab_size, np.int64)
    keys: list[list[NDArray[np.int64]]] = [[], []]
    for text in texts:
        tokens = np.asarray(text, np.int64)
        unigrams += np.bincount(tokens, minlength=vocab_size)
        for n in range(2, order + 1):
            key = tokens[: len(tokens) - n + 1]
            for i in range(1, n):
                key = key * vocab_size + tokens[i : len(tokens) - n + 1 + i]
            keys[n - 2].append(key)
    if not unigrams.any():
        raise ValueError("the texts have no tokens")
    pairs, pair_counts = _unique(keys[0])
    triples, triple_counts = _unique(keys[1])
    contexts = pairs.searchsorted(triples // vocab_size)
    width = np.uint16 if vocab_size <= 2**16 else np.uint32
    return NGramTables(
        unigrams.astype(np.uint32),
        _starts(pairs // vocab_size, vocab_size),
        (pairs % vocab_size).astype(width),
        pair_counts,
        _starts(contexts, len(pairs)),
        (triples % vocab_size).astype(width),
        triple_counts,
    )


def _unique(keys: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], Counts]:
    """Return the distinct keys, ascending, and their counts."""
    unique, counts = np.unique(np.concatenate([*keys, np.zeros(0, np.int64)]), return_counts=True)
    return unique.astype(np.int64), counts.astype(np.uint32)


def _starts(rows: NDArray[np.signedinteger[Any]], num_rows: int) -> Counts:
    """Return the start of each row's entries, and the end of the last. -> [num_rows + 1]"""
    return np.searchsorted(rows, np.arange(num_rows + 1)).astype(np.uint32)


class NGramDrafter(Drafter):
    """Drafter from n-gram tables.

    Temperature and filters apply to its log-probabilities as to the target's logits.
    """

    name = "ngram"
    is_sampled = True

    def __init__(self, tables: NGramTables) -> None:
        self._tables = tables

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        def next_row(drafted: list[int]) -> Row:
            distribution = self._tables.distribution([*history.last(2), *drafted])
            with np.errstate(divide="ignore"):
                return Row(np.log(distribution.row(self._tables.vocab_size).astype(np.float32)))

        return draw_draft(next_row, DraftRequest(history, max_tokens, sampling, uniforms))
