"""Static scales of int8 caches, one per head and channel.

H heads, D channels, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specedge.errors import ExportError

from ..graph.int8_caches import LARGEST
from ..verification.runner import Action, PassAction, ReadRows, RepeatRows, Runner
from .float_model import FloatModel

# Above the largest calibrated value, for other texts. With 1, the KL divergence of SmolLM2-135M is
# three times as large at the end of a context of 2,048 tokens, and the same at the beginning.
HEADROOM = 1.25
MAX_MEDIAN_ERROR = 0.25  # of a channel relative to its median magnitude, beyond one scale
_SMALLEST = 1e-6  # scale relative to the largest of a cache, for channels of zeros


def measure_scales(model: FloatModel, texts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return scales for the range of each channel by cache, [H, 1, D] each.

    Rotary embedding moves values between two channels with the position. Texts, [T] each, are
    therefore run at the beginning, and at positions over the whole context after repeated rows.
    """
    runner = (model.original or model).decoder_runner("gqa")
    last = runner.geometry.context_length - max(map(len, texts))
    starts = np.linspace(0, last, len(texts)).astype(int).tolist() if last else []
    actions: list[Action] = []
    for start, text in (*((0, text) for text in texts), *zip(starts, texts, strict=False)):
        actions += [
            RepeatRows(len(text), start),
            PassAction("decoder", text, start, logits_from=len(text) - 1, source=text),
            ReadRows(start, start + len(text), then=lambda name, rows: np.abs(rows).max(1)),
        ]
    maxima = zip(*runner.run(actions)[2::3], strict=True)
    scales = {}
    for name, largest in zip(runner.geometry.cache_names(), maxima, strict=True):
        scale = np.max(largest, axis=0)[:, None] * np.float32(HEADROOM / LARGEST)
        scales[name] = np.maximum(scale, max(_SMALLEST * scale.max(), np.finfo(np.float32).tiny))
    return scales


def check_scales(
    name: str,
    runner: Runner,
    scales: Mapping[str, np.ndarray],
    plain: Runner,
    text: np.ndarray,
) -> None:
    """Compare int8 caches with those of the graph that differs in the type of its caches alone.

    Medians over tokens ignore values that are clipped, or affected by a few of them.

    Args:
        name: Role and graph variant.
        runner: Runner of the graph with int8 caches.
        scales: Scales of its caches by name, [H, 1, D] each.
        plain: Runner of the graph with float caches.
        text: Tokens of one pass, [T].

    Raises:
        ExportError: A channel differs by more than rounding explains.
    """
    actions: list[Action] = [PassAction("decoder", text, 0, source=text), ReadRows(0, len(text))]
    rows, expected_rows = (each.run(actions)[1] for each in (runner, plain))
    for cache, integers, floats in zip(
        runner.geometry.cache_names(), rows, expected_rows, strict=True
    ):
        error = np.median(np.abs(integers * scales[cache] - floats), 1)
        magnitude = np.median(np.abs(floats), 1)
        excess = error - (scales[cache][:, 0] + MAX_MEDIAN_ERROR * magnitude)
        if not (excess <= 0).all():
            head, channel = np.unravel_index(np.argmax(excess), excess.shape)
            raise ExportError(
                f"{name}: channel {channel} of head {head} of {cache} in int8 differs from that in "
                f"float32 by {error[head, channel]:.1e} (median {magnitude[head, channel]:.1e}); "
                "omit --cache"
            )
