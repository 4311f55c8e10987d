"""What many short measurements of alike things say together: each alone is too noisy."""

from __future__ import annotations

import numpy as np

from ..sampling.distribution import Floats


def fitted(seconds: Floats) -> Floats:
    """Costs by mode, length of the cache and number of rows, or of draft passes. [M, L, R] -> same

    A mode and a length have a level of their own. What more rows cost beside it is one factor for
    all modes, that may change steadily with the length's index. More rows never cost less.
    """
    logs = np.log(seconds)
    level = logs.mean(2, keepdims=True)
    rest = (logs - level).mean(0)
    place = np.arange(len(rest)) - (len(rest) - 1) / 2
    slope = place @ rest / (place @ place or 1.0)
    factors = rest.mean(0) + np.outer(place, slope)
    rising = np.maximum.accumulate(factors, 1)
    falling = np.minimum.accumulate(factors[:, ::-1], 1)[:, ::-1]
    found: Floats = np.exp(level + (rising + falling) / 2)
    return found
