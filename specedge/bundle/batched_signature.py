"""Signature of the batched graph, derived from the decoder's signature.

A pass has T tokens of B sequences, packed without padding: first those of sequence 0, then those of
sequence 1, and so on. Attention reads them as a padded block of N rows per sequence, in which the
last row of each sequence is repeated, as in the decoder.
"""

from __future__ import annotations

from dataclasses import replace

from .signature import Port, Signature

BATCHED = "batched"  # decoder over several sequences
BATCHED_INPUTS = (
    Port("input_ids", "tokens", None, "int64", (1, "T")),
    Port("positions", "positions", None, "int64", (1, "T")),
    Port("block_rows", "block_rows", None, "int64", ("B", "N")),
    Port("packed_rows", "packed_rows", None, "int64", ("T",)),
    Port("logits_rows", "logits_rows", None, "int64", ("R",)),
    Port("last_positions", "last_positions", None, "int32", ("B",)),
    Port("query_lengths", "query_lengths", None, "int32", ("B",)),
)


def batched(decoder: Signature) -> Signature:
    """Return the signature of the batched graph.

    `block_rows` are the packed rows of the block, `packed_rows` the rows of the flattened block
    that are tokens, and `logits_rows` the packed rows with logits. `last_positions` is the position
    of each sequence's last row in the block, the repeated one, and `query_lengths` their number, 0
    for a sequence without tokens.
    """
    inputs = tuple(port for port in decoder.inputs if port.role == "state")
    outputs = [
        replace(port, shape=(1, *port.shape[1:])) if port.role in ("logits", "hidden") else port
        for port in decoder.outputs
    ]
    return Signature((*BATCHED_INPUTS, *inputs), tuple(outputs))
