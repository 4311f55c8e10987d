"""The part of a bundle's manifest that is for apps without specedge; it refuses what contradicts
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..option_specs import check_integer
from ..sampling_options import MAX_DRAFT_TOKENS
from .op_sets import OP_SETS
from .reports import check_single_line
from .signature import Signature

TEXT_GRAPHS = {"encode", "decode"}
GRAPHS = ("round", "draft", "accept", *sorted(TEXT_GRAPHS))


@dataclass(frozen=True)
class HostGraph:
    """One ONNX file for host apps: of a round, which part and its K (null: any), or of text."""

    name: str
    num_draft_tokens: int | None
    signature: Signature
    file: str

    def __post_init__(self) -> None:
        if self.name not in GRAPHS:
            raise ValueError(f"name is one of {', '.join(GRAPHS)}, got '{self.name}'")
        if (self.num_draft_tokens is None) is (self.name == "round"):
            raise ValueError("round has one num_draft_tokens, and other graphs have none")
        if self.num_draft_tokens is not None:
            check_integer("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        if "/" in self.file:
            raise ValueError(f"file lies in the folder itself, got '{self.file}'")


@dataclass(frozen=True)
class HostFiles:
    """What apps without specedge run.

    `ops` is the op set of the target's part. `golden` is the file of golden transcripts.
    `ids_only` says why there are no graphs that turn text into tokens and back, None if they are
    there. Each session takes `session_options`.
    """

    ops: str
    graphs: tuple[HostGraph, ...]
    golden: str | None
    ids_only: str | None
    session_options: dict[str, str]
    onnxruntime: str
    oldest_onnxruntime: str

    def __post_init__(self) -> None:
        if self.ops not in OP_SETS:
            raise ValueError(f"ops is one of {', '.join(OP_SETS)}, got '{self.ops}'")
        for name in ("ids_only", "onnxruntime", "oldest_onnxruntime"):
            check_single_line(name, getattr(self, name))
        names = {graph.name for graph in self.graphs}
        if len({(graph.name, graph.num_draft_tokens) for graph in self.graphs}) < len(self.graphs):
            raise ValueError("graphs has nothing twice")
        if names - TEXT_GRAPHS not in ({"round"}, {"draft", "accept"}):
            raise ValueError("graphs has rounds, or draft and accept")
        text_graphs = TEXT_GRAPHS if self.ids_only is None else set()
        if names & TEXT_GRAPHS != text_graphs:
            raise ValueError("ids_only is null where graphs has encode and decode, and only there")

    @property
    def files(self) -> list[str]:
        """All that lies in the folder for hosts."""
        golden = [] if self.golden is None else [self.golden]
        return [graph.file for graph in self.graphs] + golden
