"""Inputs and outputs of a graph as declared by the manifest; hosts bind them by role and state."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

DIMENSIONS = ("B", "T", "R", "N", "K", "L")
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
SAMPLING_INPUTS = (*SAMPLING_SETTINGS, "seen", "uniforms")  # inputs of a sampling graph
ROLES = (
    *("tokens", "past_length", "logits_from", "state", "logits", "best", "drafted"),
    *(*SAMPLING_INPUTS, "drawn", "weights"),
    *("positions", "block_rows", "packed_rows", "logits_rows", "last_positions", "query_lengths"),
    *("source", "hidden", "source_length", "audio"),
)
REPEATED_ROLES = ("state", "weights")  # roles of several ports each


@dataclass(frozen=True)
class Port:
    """Input or output of a graph: name, role, type and shape.

    `state` names a state of the model, which an input reads and an output writes; both may share
    memory. A dimension is a number or a name: "B" is the batch, "T" the pass length, "R" the rows
    with logits (T less `logits_from`); in the batched graph "N" is the number of rows per sequence,
    in graphs of an encoder that of the source.
    In graphs for hosts "N" is the number of tokens to process, "K" that of draft tokens, "L" that
    of the text, and "R" is K + 1.
    """

    name: str
    role: str
    state: str | None
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 100 or not self.name.isprintable():
            raise ValueError("a port's name must be 1 to 100 printable characters")
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", self.role):
            raise ValueError(f"a role must be up to 40 of a-z, 0-9 and _, got '{self.role}'")
        if (self.state is None) is (self.role == "state"):
            raise ValueError(f"{self.name}: ports with role state must name it, and no others")
        for size in self.shape:
            if size not in DIMENSIONS and (isinstance(size, str) or size < 1):
                names = ", ".join(DIMENSIONS)
                raise ValueError(
                    f"{self.name}: a dimension must be at least 1 or one of {names}, got {size!r}"
                )

    @property
    def summary(self) -> str:
        """Role or state, type and shape as one line."""
        return f"{self.state or self.role}, {self.dtype} {[*self.shape]}"

    def at(self, batch: int, length: int, rows: int, block: int = 0) -> list[int]:
        """Return the shape for a batch size, pass length, and numbers of rows (R and N)."""
        sizes = {"B": batch, "T": length, "R": rows, "N": block}
        return [sizes[size] if isinstance(size, str) else size for size in self.shape]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a graph. The last output of a state is its content."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def __post_init__(self) -> None:
        for ports in (self.inputs, self.outputs):
            if len({port.name for port in ports}) < len(ports):
                raise ValueError("names must be unique among inputs and among outputs")
            roles = Counter(p.role for p in ports if p.role not in REPEATED_ROLES)
            if repeated := next((role for role, count in roles.items() if count > 1), None):
                raise ValueError(f"role '{repeated}' appears twice among inputs or among outputs")
        states = [port.state for port in self.inputs if port.state]
        if len({*states}) < len(states):
            raise ValueError("states must be unique among inputs")

    @property
    def logits(self) -> Port | None:
        """Output that has the logits, or None."""
        return next((t for t in self.outputs if t.role == "logits"), None)

    @property
    def num_drafted(self) -> int:
        """Number of tokens that a call drafts; 1 if the shapes do not state it."""
        ports = [port for port in self.inputs if port.role == "uniforms"]
        ports += [port for port in self.outputs if port.role == "drafted"]
        sizes = [port.shape[-1] for port in ports if port.shape]
        return next((size for size in sizes if isinstance(size, int)), 1)

    def difference(self, expected: Signature) -> str | None:
        """Describe the first difference from another signature in ports of known roles."""
        pairs = ((self.inputs, expected.inputs), (self.outputs, expected.outputs))
        for ports, expected_ports in pairs:
            by_name = {port.name: port for port in expected_ports}
            for port in (port for port in ports if port.role in ROLES):
                if port != (other := by_name.pop(port.name, None)):
                    expected_port = other.summary if other else "no such port"
                    return f"{port.name} is {port.summary}, expected {expected_port}"
            for name in by_name:
                return f"{name} is missing"
        return None

    @property
    def unknown(self) -> list[str]:
        """Names of inputs with unknown roles."""
        return [port.name for port in self.inputs if port.role not in ROLES]
