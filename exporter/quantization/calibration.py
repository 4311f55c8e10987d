"""What matrices read while a float graph runs a text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from ..graph.graphs import GraphFile
from ..tracing.geometry import Geometry
from ..verification.runner import FillNoise, PassAction, Runner
from ..verification.subgraph import SubgraphSession, Values, open_session, unpacked_options
from .experts import NOTHING, Apart, mixtures, opened
from .matrices import groups

NUM_ROWS = 48  # of the texts, that errors are measured with
ANSWER_TOKENS = 48  # of a prompt's answer
_DECODER = GraphFile("decoder", None, prefix="calibration-")


@dataclass(frozen=True)
class Seen:
    """Statistics of a group's input: maximum and mean square by channel [K], sample rows [n, K].

    And, if it is wanted, the Hessian of its products' squared errors, x^T x of all rows [K, K].
    """

    largest: np.ndarray
    square: np.ndarray
    rows: np.ndarray
    hessian: torch.Tensor | None = None

    @classmethod
    def of(cls, x: np.ndarray, num_rows: int = NUM_ROWS) -> Seen:
        """A value of a pass, and rows of it that are evenly apart. [T, K]"""
        return cls(np.abs(x).max(0), np.square(x).mean(0), x[:: max(1, len(x) // num_rows)].copy())

    @classmethod
    def all(cls, parts: Sequence[Seen]) -> Seen:
        """Of several passes over about as many tokens each."""
        return cls(
            np.max([part.largest for part in parts], axis=0),
            np.mean([part.square for part in parts], axis=0),
            np.concatenate([part.rows for part in parts]),
        )


def answers(
    decoder: Path, geometry: Geometry, prompts: Sequence[np.ndarray], end_tokens: Container[int]
) -> list[np.ndarray]:
    """Return prompts with what a float graph answers by greedy decoding. [T] each

    The whole graph is one session over its mapped weights, without copies of them.
    """
    shapes = dict(zip(geometry.cache_names(), geometry.cache_shapes(), strict=True))
    options = unpacked_options()
    options.enable_cpu_mem_arena = False
    # Folding would copy each transposed matrix; fusion with its product needs no copy.
    folding = ["ConstantFolding"]
    stage = SubgraphSession(shapes, "float32", lambda *_: open_session(decoder, options, folding))
    try:
        return [_answer(stage, geometry, prompt, end_tokens) for prompt in prompts]
    finally:
        stage.close()


def _answer(
    stage: SubgraphSession, geometry: Geometry, prompt: np.ndarray, end_tokens: Container[int]
) -> np.ndarray:
    tokens, new, length = [*prompt], prompt, 0
    stage.fill_noise(0, geometry.capacity)
    for _ in range(min(ANSWER_TOKENS, geometry.context_length - len(prompt))):
        inputs = {
            "input_ids": new[None].astype(np.int64),
            "past_length": np.array([length], np.int64),
            "logits_from": np.array([len(new) - 1], np.int64),
        }
        logits = stage.run("decoder", False, inputs)["logits"][0, -1]
        length += len(new)
        token = int(logits.argmax())
        tokens.append(token)
        if token in end_tokens:
            break
        new = np.array([token])
    return np.array(tokens, np.int64)


Visit = Callable[[tuple[int, ...], Seen], None]


def visit_inputs(
    decoder: Path,
    geometry: Geometry,
    ops: str,
    texts: Sequence[np.ndarray],
    visit: Visit,
    apart: Apart = NOTHING,
    hessians: bool = False,
    wanted: Container[tuple[int, ...]] | None = None,
) -> None:
    """Run a graph for any length over texts that begin anew, and visit what each group reads.

    And what experts read. Nothing of a group that reads a cache itself. A group is visited by its
    key, as soon as the part of a large model that it is in has run, so that the Hessians of one
    part are held at a time; with `wanted` no other group is. [T] each
    """
    model = opened(decoder, apart)
    keys: defaultdict[str | None, list[tuple[int, ...]]] = defaultdict(list)
    found = groups(model.graph, apart.places)
    with_hessian = {group.key for group in found if hessians}
    readers = {group.key: group.value for group in found}
    readers |= {one.experts.key: one.x for one in mixtures(model.graph, apart)}
    readers = {key: x for key, x in readers.items() if wanted is None or key in wanted}
    for key, value in readers.items():
        keys[value.name].append(key)
        value.dtype = ir.DataType.FLOAT
        if not value.is_graph_output():
            model.graph.outputs.append(value)
    path = decoder.parent / _DECODER.file(ops)
    ir.save(model, path)
    parts: defaultdict[tuple[int, ...], list[Seen]] = defaultdict(list)
    sums: dict[str, torch.Tensor] = {}
    num_rows = max(1, NUM_ROWS // len(texts))

    def told(made: Values) -> None:
        for name in made.keys() & keys.keys():
            x = made[name].reshape(-1, made[name].shape[-1])
            seen = Seen.of(x, num_rows)
            for key in keys[name]:
                parts[key].append(seen)
            if with_hessian.intersection(keys[name]):
                rows = torch.from_numpy(x)
                if name not in sums:
                    sums[name] = torch.zeros(x.shape[1], x.shape[1])
                sums[name].addmm_(rows.T, rows)

    def ended(stages: int) -> None:
        for name, group_keys in keys.items():
            for key in group_keys:
                if key in parts:
                    hessian = sums.get(name or "") if key in with_hessian else None
                    visit(key, replace(Seen.all(parts.pop(key)), hessian=hessian))
            sums.pop(name or "", None)

    try:
        runner = Runner(decoder.parent, [_DECODER], geometry, ops)
        passes = [PassAction("decoder", text, 0, on_outputs=told) for text in texts]
        noise = FillNoise(0, geometry.capacity)
        runner.run([], ended, through=[noise, *passes])
    finally:
        path.unlink()
