"""What many short measurements of alike things say together: each alone is too noisy."""

from __future__ import annotations

import numpy as np

from ..sampling.distribution import Floats


def fitted(seconds: Floats) -> Floats:
    """Costs by mode, length of the cache and number of rows, or of draft passes. [M, L, R] -> same

    A mode and a length have a level of their own. What more rows cost beside it is one factor for
    all modes, that may change steadily with the length's index. More rows never cost less. Rows
    that were not timed everywhere, nan there, were at the middle length: they change with the
    length as their neighbours do.
    """
    logs = np.log(seconds)
    rows = np.arange(logs.shape[2])
    everywhere = rows[~np.isnan(logs).any((0, 1))]
    level = logs[..., everywhere].mean(2, keepdims=True)
    rest = (logs - level)[..., everywhere].mean(0)
    place = np.arange(len(rest)) - (len(rest) - 1) / 2
    slope = np.interp(rows, everywhere, place @ rest / (place @ place or 1.0))
    middle = len(rest) // 2
    centre = np.nanmean((logs - level)[:, middle], 0) - place[middle] * slope
    centre[everywhere] = rest.mean(0)
    factors = centre + np.outer(place, slope)
    rising = np.maximum.accumulate(factors, 1)
    falling = np.minimum.accumulate(factors[:, ::-1], 1)[:, ::-1]
    found: Floats = np.exp(level + (rising + falling) / 2)
    return found
