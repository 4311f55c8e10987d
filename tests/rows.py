"""Measurement of batch invariance through the runtime."""

import numpy as np

LENGTHS = (1, 2, 3, 5, 9, 18, 36, 64, 128, 256)  # tested lengths; from 18 on prompts only


def dependent_lengths(model, lengths, num_tokens=300):
    """Return the pass lengths whose logits or cache rows are not bitwise equal to one pass."""
    tokens = np.random.default_rng(0).integers(1, model.vocab_size, num_tokens).tolist()

    def run(length):
        model.truncate(0)
        for cache in model.cache.arrays.values():
            cache[:] = 1.0  # stale rows that are read would show
        starts = range(0, num_tokens, length)
        logits = [model.forward(tokens[at : at + length]).array().copy() for at in starts]
        return [
            np.concatenate(logits),
            *(c[:, :, :num_tokens].copy() for c in model.cache.arrays.values()),
        ]

    wide = run(num_tokens)
    return [t for t in lengths if not all(map(np.array_equal, run(t), wide))]
