"""Signatures of graphs for GPUs, derived from the decoder's signature.

They reduce copies from the device, and draft in one call. K is the number of draft tokens, C the
number of columns that are tokens.
"""

from __future__ import annotations

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
    """Return the signature of a graph that drafts K tokens in one call, greedily or by sampling.

    Each step has outputs for the caches. In a sampling graph, `drawn` has, for each token: its
    column; a number that is 0 if all logits are finite; the number of nonzero weights; its weight;
    the sum of weights; then the largest weights in descending order and their columns. All weights
    are separate outputs, for hosts that need more of them. A draft head also returns the hidden
    state of the last step.
    """
    steps = range(num_draft_tokens)
    states = [
        replace(p, shape=("B", 1, p.shape[-1])) for p in signature.outputs if p.role == "hidden"
    ]
    caches = [port for port in signature.outputs if port.role == "state"]
    step_caches = [replace(p, name=step_output(i, p.name)) for i in steps for p in caches]
    inputs = [port for port in signature.inputs if port.role != "logits_from"]
    if name == UNROLLED:
        drafted = Port("drafted", "drafted", None, "int64", ("B", num_draft_tokens))
        return Signature(tuple(inputs), (drafted, *states, *step_caches))
    types = {"top_k": "int64", "top_p": "float64"}
    inputs += [Port(s, s, None, types.get(s, "float32"), (1,)) for s in SAMPLING_SETTINGS]
    inputs.append(Port("seen", "seen", None, "bool", ("B", num_columns)))
    inputs.append(Port("uniforms", "uniforms", None, "float64", (num_draft_tokens,)))
    shape = (num_draft_tokens, 2 * num_best(num_columns) + NUM_SUMMARY_FIELDS)
    drawn = Port("drawn", "drawn", None, "float64", shape)
    names = [step_output(i, "weights") for i in steps]
    step_weights = [Port(n, "weights", None, "float32", ("B", num_columns)) for n in names]
    return Signature(tuple(inputs), (drawn, *step_weights, *states, *step_caches))


def step_output(step: int, name: str) -> str:
    """Return the name of a decoder's output at a step of a multi-step graph."""
    return f"step.{step}.{name}"
