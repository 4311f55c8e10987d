"""Signatures of graphs for GPUs, derived from the decoder's signature.

They reduce copies from the device, and draft in one call. K is the number of draft tokens, C the
number of columns that are tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .signature import SAMPLING_SETTINGS, Port, Signature

SCORED = "scored"  # decoder with an output of top logits
UNROLLED = "unrolled"  # K greedy draft steps
SAMPLED = "sampled"  # K draft steps that sample with a request's settings
ONE_CALL = (UNROLLED, SAMPLED)
NUM_SUMMARY_FIELDS = 5  # fields of `drawn` before the largest weights


def num_best(num_columns: int) -> int:
    """Return the number of top logits per row, or of top weights per distribution."""
    return min(64, num_columns)


def with_best(signature: Signature, num_columns: int) -> Signature:
    """Return the signature of a scored graph.

    The additional output has, for each row, the top logits in descending order, their columns, and
    a number that is 0 if all logits of the row are finite.
    """
    shape = ("B", "R", 2 * num_best(num_columns) + 1)
    best = Port("best", "best", None, "float32", shape)
    return replace(signature, outputs=(*signature.outputs, best))


def one_call(name: str, signature: Signature, num_columns: int, num_draft_tokens: int) -> Signature:
    """Return the signature of a graph that drafts in one call."""
    if name == UNROLLED:
        return unrolled(signature, num_draft_tokens)
    return sampled(signature, num_columns, num_draft_tokens)


def unrolled(signature: Signature, num_draft_tokens: int) -> Signature:
    """Return the signature of an unrolled graph of K greedy draft steps."""
    tokens = Port("drafted", "drafted", None, "int64", ("B", num_draft_tokens))
    return Signature(_inputs(signature), (tokens, *_caches(signature, num_draft_tokens)))


def sampled(signature: Signature, num_columns: int, num_draft_tokens: int) -> Signature:
    """Return the signature of a graph of K draft steps that sample.

    `drawn` has, for each token: its column; a number that is 0 if all logits are finite; the number
    of nonzero weights; its weight; the sum of weights; then the largest weights in descending order
    and their columns. All weights are separate outputs, for hosts that need more of them.
    """
    types = {"top_k": "int64", "top_p": "float64"}
    settings = [Port(s, s, None, types.get(s, "float32"), (1,)) for s in SAMPLING_SETTINGS]
    seen = Port("seen", "seen", None, "bool", ("B", num_columns))
    uniforms = Port("uniforms", "uniforms", None, "float64", (num_draft_tokens,))
    shape = (num_draft_tokens, 2 * num_best(num_columns) + NUM_SUMMARY_FIELDS)
    outputs = [Port("drawn", "drawn", None, "float64", shape)]
    for i in range(num_draft_tokens):
        name = step_output(i, "weights")
        outputs.append(Port(name, "weights", None, "float32", ("B", num_columns)))
    return Signature(
        (*_inputs(signature), *settings, seen, uniforms),
        (*outputs, *_caches(signature, num_draft_tokens)),
    )


def step_output(step: int, name: str) -> str:
    """Return the name of a decoder's output at a step of a multi-step graph."""
    return f"step.{step}.{name}"


def _inputs(signature: Signature) -> tuple[Port, ...]:
    return tuple(t for t in signature.inputs if t.role != "logits_from")


def _caches(signature: Signature, num_draft_tokens: int) -> Iterator[Port]:
    """Yield the cache outputs of each step."""
    for i in range(num_draft_tokens):
        for port in signature.outputs:
            if port.role == "state":
                yield replace(port, name=step_output(i, port.name))
