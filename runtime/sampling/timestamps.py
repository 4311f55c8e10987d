"""Rules of Whisper's timestamps, as in openai-whisper and transformers."""

from __future__ import annotations

import numpy as np

from specedge.sampling_options import TimestampRules

from .distribution import Floats, Ids
from .history import History


def apply_timestamp_rules(
    logits: Floats, rules: TimestampRules, history: History, ids: Ids | None
) -> None:
    """Mask a row of logits in place. [n]

    A text begins with a timestamp, and timestamps follow each other in pairs: the end of a segment
    and the beginning of the next one. If all timestamps together are more likely than any other
    token, one of them follows.

    Args:
        logits: Logits of the tokens `ids`, after all other processors. [n]
        rules: Tokens of the timestamps.
        history: Text before the row's token.
        ids: Token ids, ascending; None for ids 0 to n - 1. [n]
    """

    def column(token: int) -> int:
        return min(token, len(logits)) if ids is None else int(ids.searchsorted(token))

    first, text = column(rules.first), history.tokens[history.num_prompt_tokens :]
    stamps = [token for token in text if token >= rules.first]
    ends_with_stamp = bool(text) and text[-1] >= rules.first
    is_complete = len(text) < 2 or text[-2] >= rules.first  # the pair, or a first timestamp
    logits[column(rules.first - 1) : first] = -np.inf  # <|notimestamps|>
    if ends_with_stamp:
        if is_complete:
            logits[first:] = -np.inf
        else:
            logits[: column(rules.end)] = -np.inf
    if stamps:
        least = stamps[-1] + (not ends_with_stamp or is_complete)
        logits[first : column(least)] = -np.inf
    if not text:
        logits[:first] = -np.inf
        logits[column(rules.first + rules.max_initial + 1) :] = -np.inf
    if _log_sum(logits[first:]) > np.max(logits[:first], initial=-np.inf):
        logits[:first] = -np.inf


def _log_sum(logits: Floats) -> float:
    """Return the logarithm of the sum of exponentials; -inf if there are none."""
    largest = np.max(logits, initial=-np.inf)
    if largest == -np.inf:
        return float(largest)
    return float(largest + np.log(np.exp(logits - largest).sum()))
