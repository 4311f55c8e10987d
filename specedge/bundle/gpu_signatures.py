"""What graphs for GPUs take and give, by their decoder's signature: there the host fetches no more
than it needs, and a draft may take one call. K draft tokens, C columns that are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .signature import SAMPLING_SETTINGS, Signature, TensorSpec

SCORED = "scored"  # a decoder that gives the best logits of each row, too
UNROLLED = "unrolled"  # K greedy draft steps
SAMPLED = "sampled"  # K draft steps under a request's settings, which draw
ONE_CALL = (UNROLLED, SAMPLED)
NUM_SUMMARY_FIELDS = 5  # numbers of a drawn row before its likeliest tokens


def num_best(num_columns: int) -> int:
    """How many logits of a row a scored graph gives apart from the row, and how many weights of a
    distribution one that draws.
    """
    return min(64, num_columns)


def with_best(signature: Signature, num_columns: int) -> Signature:
    """Of a scored graph.

    Of each row the best logits, the largest first, their columns, and a number that is 0 where all
    of the row are finite.
    """
    shape = ("B", "R", 2 * num_best(num_columns) + 1)
    best = TensorSpec("best", "best", None, "float32", shape)
    return replace(signature, outputs=(*signature.outputs, best))


def one_call(name: str, signature: Signature, num_columns: int, num_draft_tokens: int) -> Signature:
    """Of a graph that drafts in one call, by its name."""
    if name == UNROLLED:
        return unrolled(signature, num_draft_tokens)
    return sampled(signature, num_columns, num_draft_tokens)


def unrolled(signature: Signature, num_draft_tokens: int) -> Signature:
    """The tokens, and what each step makes of the buffers."""
    tokens = TensorSpec("drafted", "drafted", None, "int64", ("B", num_draft_tokens))
    return Signature((*_taken(signature),), (tokens, *_made(signature, num_draft_tokens)))


def sampled(signature: Signature, num_columns: int, num_draft_tokens: int) -> Signature:
    """The same under settings, with what a host needs of the distributions of the tokens.

    `drawn` has of each token its column, a number that is 0 if all logits are finite, how many
    weights are not 0, its own weight and the sum of all; then the largest weights, the largest
    first, and their columns. All weights are apart, for hosts that need more of them than that.
    """
    types = {"top_k": "int64", "top_p": "float64"}
    settings = [TensorSpec(s, s, None, types.get(s, "float32"), (1,)) for s in SAMPLING_SETTINGS]
    seen = TensorSpec("seen", "seen", None, "bool", ("B", num_columns))
    uniforms = TensorSpec("uniforms", "uniforms", None, "float64", (num_draft_tokens,))
    shape = (num_draft_tokens, 2 * num_best(num_columns) + NUM_SUMMARY_FIELDS)
    outputs = [TensorSpec("drawn", "drawn", None, "float64", shape)]
    for i in range(num_draft_tokens):
        name = step_output(i, "weights")
        outputs.append(TensorSpec(name, "weights", None, "float32", ("B", num_columns)))
    return Signature(
        (*_taken(signature), *settings, seen, uniforms),
        (*outputs, *_made(signature, num_draft_tokens)),
    )


def step_output(step: int, name: str) -> str:
    """What a graph of several steps calls an output of a decoder that one of them makes."""
    return f"step.{step}.{name}"


def _taken(signature: Signature) -> Iterable[TensorSpec]:
    return (t for t in signature.inputs if t.role != "logits_from")


def _made(signature: Signature, num_draft_tokens: int) -> Iterable[TensorSpec]:
    caches = [t for t in signature.outputs if t.role == "cache"]
    return (
        replace(t, name=step_output(i, t.name)) for i in range(num_draft_tokens) for t in caches
    )
