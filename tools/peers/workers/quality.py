"""Distance of a quantized model from the float32 reference, on windows of held-out text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROWS = 64  # rows of logits that are compared at a time
Logits = Callable[[list[int]], np.ndarray]


def write_reference(
    logits: Logits, windows: Path, folder: Path, dtype: npt.DTypeLike = np.float16
) -> None:
    """Store the reference's log-probabilities of every window.

    The error of float16 is far below the divergence of any quantized model: near 0, where the
    probability mass is, the square of 5e-4 of a value. Losses and the most probable tokens are
    stored exactly.
    """
    folder.mkdir()
    texts = json.loads(windows.read_text("utf-8"))
    for name, text in texts.items():
        rows, best, loss = [], [], []
        for window in text:
            log_probs = _log_softmax(logits(window)[:-1])
            best.append(log_probs.argmax(1))
            loss.append(-log_probs[np.arange(len(window) - 1), window[1:]])
            rows.append(log_probs.astype(dtype))
        np.save(folder / f"{name}.npy", np.concatenate(rows))
        np.savez(folder / f"{name}.npz", best=np.concatenate(best), loss=np.concatenate(loss))


def measure(logits: Logits, windows: str, reference: str) -> dict[str, Any]:
    """Return the quality of each text: mean KL, top-1 agreement and perplexities.

    KL is the divergence of the model from the reference, in nats per token.
    """
    texts = json.loads(Path(windows).read_text("utf-8"))
    return {"texts": {n: _measure(logits, text, Path(reference), n) for n, text in texts.items()}}


def _measure(logits: Logits, windows: list[list[int]], folder: Path, name: str) -> dict[str, float]:
    reference = np.load(folder / f"{name}.npy", mmap_mode="r")
    exact = np.load(folder / f"{name}.npz")
    divergence, loss, same, row = 0.0, 0.0, 0, 0
    for window in windows:
        scores = logits(window)[:-1]
        targets = np.array(window[1:])
        for start in range(0, len(targets), ROWS):
            # Columns beyond the reference's vocabulary are padding.
            ours = _log_softmax(scores[start : start + ROWS, : reference.shape[1]])
            count = len(ours)
            theirs = reference[row : row + count].astype(np.float32)
            divergence += float((np.exp(theirs) * (theirs - ours)).sum(dtype=np.float64))
            same += int((ours.argmax(1) == exact["best"][row : row + count]).sum())
            loss -= float(ours[np.arange(count), targets[start : start + count]].sum())
            row += count
    return {
        "tokens": row,
        "kl": divergence / row,
        "top1": same / row,
        "perplexity": float(np.exp(loss / row)),
        "reference_perplexity": float(np.exp(exact["loss"].mean())),
    }


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float32) - logits.max(1, keepdims=True)
    total = np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)
    return shifted - np.log(total).astype(np.float32)
