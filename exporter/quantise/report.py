"""How far a quantised model is from the one that it was made of, on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..compare.runner import Action, FillNoise, Pass, Rows, Runner


@dataclass
class Distance:
    """What two models make of the same tokens, added up over n of them.

    Losses are of the `num_scored` tokens that the logits have a column for. `error` is the largest
    difference of a value of logits or cache, in the largest value.
    """

    loss: float = 0.0  # nats, of the model that is measured
    original_loss: float = 0.0
    divergence: float = 0.0  # Kullback-Leibler, of the original from it
    num_same: int = 0  # likeliest tokens
    num_tokens: int = 0
    num_scored: int = 0
    error: float = 0.0

    def add(
        self, found: np.ndarray, wanted: np.ndarray, tokens: np.ndarray, head: np.ndarray | None
    ) -> None:
        """Count a text's logits, 2 * [T, n], and the tokens that they are of, [T].

        Column j is token head[j], or token j.
        """
        ours, theirs = _log_softmax(found[:-1]), _log_softmax(wanted[:-1])
        rows, columns = np.arange(len(tokens) - 1), tokens[1:]
        if head is not None:
            rows = np.flatnonzero(np.isin(columns, head))
            columns = head.searchsorted(columns[rows])
        places = rows, columns
        self.loss -= float(ours[places].sum())
        self.original_loss -= float(theirs[places].sum())
        self.divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        self.num_same += int((found[:-1].argmax(1) == wanted[:-1].argmax(1)).sum())
        self.num_tokens += len(tokens) - 1
        self.num_scored += len(rows)
        self.compare(found, wanted)

    def compare(self, found: np.ndarray, wanted: np.ndarray) -> None:
        """Keep the largest difference of an output, in its largest value."""
        size = max(1e-30, float(np.abs(wanted).max()))
        self.error = max(self.error, float(np.abs(found - wanted).max()) / size)


def distance(
    original: Runner, found: Runner, texts: Sequence[np.ndarray], head: np.ndarray | None = None
) -> Distance:
    """Run both over texts that begin anew, [T] each; `head` [n] are their columns' tokens."""
    total = Distance()
    results = zip(texts, _run(found, texts), _run(original, texts), strict=True)
    for text, (logits, caches), (wanted, wanted_caches) in results:
        total.add(logits, wanted, text, head)
        for ours, theirs in zip(caches, wanted_caches, strict=True):
            total.compare(ours, theirs)
    return total


def logits(runner: Runner, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of texts that begin anew, [T] each. -> [T, V] each"""
    return [found for found, _ in _run(runner, texts)]


def _run(runner: Runner, texts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Logits [T, V] and caches [H, T, D] of each text."""
    actions: list[Action] = []
    for text in texts:
        actions += [FillNoise(0, runner.geometry.capacity), Pass("decoder", text, 0)]
        actions.append(Rows(0, len(text)))
    results = runner.run([], through=actions)
    return list(zip(results[1::3], results[2::3], strict=True))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(1, keepdims=True)))
