"""What a graph takes and gives, as the manifest declares it: a host binds by it, whatever comes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

DIMENSIONS = ("B", "T", "R", "N", "K")
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SAMPLING_INPUTS = (*SAMPLING_SETTINGS, "seen", "uniforms")  # what a graph that draws is told
ROLES = (
    *("tokens", "past_length", "logits_from", "cache", "logits", "best", "drafted"),
    *(*SAMPLING_INPUTS, "drawn", "weights"),
)
REPEATED_ROLES = ("cache", "weights")  # of several tensors, which hosts tell apart by name


@dataclass(frozen=True)
class TensorSpec:
    """An input or output: its name in the graph, what it is for, its type and its shape.

    `buffer` says which buffer of the cache it is; input and outputs of one buffer may share memory.
    A dimension is a number, or "B" or "T", the graph's batch and length, or "R", the rows that
    logits are asked of: T less `logits_from`. In graphs for hosts "N" are the tokens to feed, "K"
    the draft tokens, and "R" one more.
    """

    name: str
    role: str
    buffer: str | None
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 100 or not self.name.isprintable():
            raise ValueError("a tensor's name is 1 to 100 printable characters")
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", self.role):
            raise ValueError(f"a role is up to 40 of a-z, 0-9 and _, got '{self.role}'")
        if (self.buffer is None) is (self.role == "cache"):
            raise ValueError(f"{self.name}: the cache's tensors name a buffer, and no others")
        for size in self.shape:
            if size not in DIMENSIONS and (isinstance(size, str) or size < 1):
                known = ", ".join(DIMENSIONS)
                raise ValueError(f"{self.name}: a dimension is at least 1 or {known}, got {size!r}")

    def at(self, batch: int, length: int, rows: int) -> list[int]:
        """The shape in a pass of that length, asked for the logits of so many rows."""
        sizes = {"B": batch, "T": length, "R": rows}
        return [sizes[size] if isinstance(size, str) else size for size in self.shape]


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a graph. A buffer is what the last of its outputs says."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        for tensors in (self.inputs, self.outputs):
            if len({tensor.name for tensor in tensors}) < len(tensors):
                raise ValueError("no name appears twice among inputs, nor among outputs")
            roles = Counter(t.role for t in tensors if t.role not in REPEATED_ROLES)
            if repeated := next((role for role, count in roles.items() if count > 1), None):
                raise ValueError(f"role '{repeated}' appears twice among inputs or among outputs")
        buffers = [tensor.buffer for tensor in self.inputs if tensor.buffer]
        if len({*buffers}) < len(buffers):
            raise ValueError("no buffer appears twice among inputs")

    @property
    def logits(self) -> TensorSpec | None:
        """The output that has the logits."""
        return next((t for t in self.outputs if t.role == "logits"), None)

    @property
    def num_drafted(self) -> int:
        """How many tokens it drafts, 1 if that is not said as a number."""
        told = [t for t in self.inputs if t.role == "uniforms"]
        told += [t for t in self.outputs if t.role == "drafted"]
        sizes = [t.shape[-1] for t in told if t.shape]
        return next((size for size in sizes if isinstance(size, int)), 1)

    def has(self, other: Signature) -> bool:
        """Whether it is the other one, with nothing more than tensors of roles unknown here."""
        pairs = ((self.inputs, other.inputs), (self.outputs, other.outputs))
        return all({t for t in mine if t.role in ROLES} == {*its} for mine, its in pairs)

    @property
    def unknown(self) -> list[str]:
        """The names of inputs whose role says nothing here."""
        return [tensor.name for tensor in self.inputs if tensor.role not in ROLES]
