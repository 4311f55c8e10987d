"""What a pair does on a device: its passes, its drafts in one call, and whole requests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import specedge
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling
from specedge.theory.formulas import alpha_from_tokens, speedup

K = 4
PAST = 256
NEW_TOKENS = 96
PROMPTS = (
    "def read_config(path):\n    ",
    "import json\n\n\nclass Store:\n    def __init__(self",
    "for name in sorted(os.listdir(folder)):\n    ",
)
REPEATS = 3
PASSES = 30


@dataclass(frozen=True)
class Least:
    """Seconds of one thing, repeated."""

    least: float
    middle: float

    @classmethod
    def of(cls, run: Callable[[], object], repeats: int) -> Least:
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return cls(min(times[1:]), median(times[1:]))  # the first binds and captures

    def milliseconds(self) -> dict[str, float]:
        return {"least": 1e3 * self.least, "median": 1e3 * self.middle}


def measure(folder: Path, precision: str, device: str, speed: float) -> dict[str, Any]:
    """Everything of one pair in one precision."""
    begin = time.perf_counter()
    with specedge.load(folder / precision, device=device) as pipeline:
        found: dict[str, Any] = {
            "load_seconds": time.perf_counter() - begin,
            "note": pipeline.note,
            "row_independent": list(pipeline.target.invariant_lengths),
        }
        for role, lengths in (("target", [1, 2, K + 1]), ("draft", [1, 2])):
            model, facts = getattr(pipeline, role), pipeline.bundle.models[role]
            size = pipeline.bundle.files[facts.weights].size
            found[role] = {
                "ops": model.ops,
                "weights_bytes": size,
                "bound_milliseconds": 1e3 * size / speed,
                "passes": passes(model, lengths),
            }
        found["draft"]["call"] = call(pipeline.draft, Sampling())
        drawn = Sampling(temperature=1.0, top_k=20), Sampling(temperature=1.0)
        found["draft"]["drawn_calls"] = {s.top_k: call(pipeline.draft, s) for s in drawn}
        found["requests"] = requests(pipeline)
    found["predicted_speedup"] = predicted(found)
    gc.collect()
    return found


def passes(model: OrtModel, lengths: list[int]) -> dict[str, Any]:
    """A pass of each T behind a cache of `PAST` tokens, captured and, on a GPU, as it comes."""
    found: dict[str, Any] = {}
    session = model._session
    for length in lengths:
        model.truncate(0)
        model.prefill([0] * PAST)

        def captured(length: int = length) -> None:
            model.truncate(PAST)
            model.forward([0] * length)

        def eager(length: int = length, bound: Any = None) -> None:
            model.truncate(PAST)
            session.run(bound, [0] * length)

        found[str(length)] = {"captured": Least.of(captured, PASSES).milliseconds()}
        bound = session.bind(model.cache, length, length)
        once = Least.of(lambda b=bound: eager(bound=b), PASSES)
        found[str(length)]["eager"] = once.milliseconds()
    model.truncate(0)
    return found


def call(model: OrtModel, sampling: Sampling) -> dict[str, float] | None:
    """A draft of K tokens in one call behind as many; None where passes are taken."""
    model.truncate(0)
    model.prefill([0] * PAST)
    asked = [0], K, History([0]), sampling, np.full(K, 0.5)
    if model.draft(*asked) is None:
        return None

    def drafted() -> None:
        model.truncate(PAST)
        model.draft(*asked)

    found = Least.of(drafted, PASSES).milliseconds()
    model.truncate(0)
    return found


def requests(pipeline: Pipeline) -> dict[str, Any]:
    """Plain decoding and K, in turn: milliseconds a token, the parts of a round, the same text?"""
    times: dict[int, list[float]] = {0: [], K: []}
    texts: dict[int, list[list[int]]] = {0: [], K: []}
    stats = None
    for _ in range(REPEATS):
        for prompt in PROMPTS:
            for k in times:
                pipeline.forget()
                one = pipeline.generate(
                    prompt, NEW_TOKENS, num_draft_tokens=k, drafter="model", ignore_eos=True
                )
                times[k].append(one.stats.decode_seconds / one.stats.num_new_tokens)
                texts[k].append(one.tokens)
                stats = one.stats if k else stats
    assert stats is not None
    seconds = {
        part: getattr(stats, f"{part}_seconds") for part in ("draft", "verify", "sampling", "other")
    }
    total = sum(seconds.values())
    per_round = stats.tokens_per_round or 1.0
    return {
        "plain": {"least": 1e3 * min(times[0]), "median": 1e3 * median(times[0])},
        "speculative": {"least": 1e3 * min(times[K]), "median": 1e3 * median(times[K])},
        "speedup": median(times[0]) / median(times[K]),
        "tokens_per_round": per_round,
        "same_text": sum(a == b for a, b in zip(texts[0], texts[K], strict=True)),
        "num_texts": len(texts[0]),
        "shares": {part: value / total for part, value in seconds.items()},
    }


def predicted(found: dict[str, Any]) -> float:
    """The speed-up by our form: passes and calls as measured, acceptance as seen, no time between
    them.
    """
    target, draft = found["target"]["passes"], found["draft"]
    plain, verify = target["1"]["captured"]["median"], target[str(K + 1)]["captured"]["median"]
    one = (
        draft["call"]["median"] / K if draft["call"] else draft["passes"]["1"]["captured"]["median"]
    )
    alpha = alpha_from_tokens(found["requests"]["tokens_per_round"], K)
    return speedup(alpha, K, one / plain, verify / plain)
