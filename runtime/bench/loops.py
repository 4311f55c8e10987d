"""Where a text falls into a loop. Acceptance and speed behind that say nothing about real text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

LENGTH = 8  # tokens in a row
TIMES = 3


def length_before_loop(tokens: Sequence[int]) -> int:
    """How many tokens come before the same 8 begin for the third time; all, if they never do."""
    seen: Counter[tuple[int, ...]] = Counter()
    for start in range(len(tokens) - LENGTH + 1):
        run = tuple(tokens[start : start + LENGTH])
        seen[run] += 1
        if seen[run] == TIMES:
            return start
    return len(tokens)
