"""Manifest section for applications without specedge, with consistency checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from ..option_specs import check_integer
from ..sampling_options import MAX_DRAFT_TOKENS
from ..strict_json import OPTIONAL
from .graph_variants import GRAPH_VARIANTS
from .reports import check_single_line
from .signature import Signature

TEXT_GRAPHS = {"encode", "decode"}
GRAPHS = ("round", "draft", "accept", "fuse", "open", *sorted(TEXT_GRAPHS))


@dataclass(frozen=True)
class HostGraph:
    """ONNX file for host applications: a round or a part of one, a source, or text.

    `num_draft_tokens` is the K of a round graph, None for other graphs.
    """

    name: str
    num_draft_tokens: int | None
    signature: Signature
    file: str

    def __post_init__(self) -> None:
        if self.name not in GRAPHS:
            raise ValueError(f"name must be one of {', '.join(GRAPHS)}, got '{self.name}'")
        if (self.num_draft_tokens is None) is (self.name == "round"):
            raise ValueError("round must have num_draft_tokens, and other graphs must not")
        if self.num_draft_tokens is not None:
            check_integer("num_draft_tokens", self.num_draft_tokens, 1, MAX_DRAFT_TOKENS)
        if "/" in self.file:
            raise ValueError(f"file must be a plain file name, got '{self.file}'")


@dataclass(frozen=True)
class HostFiles:
    """Files for applications without specedge.

    Attributes:
        ops: Graph variant of the target's part.
        graphs: Graphs of rounds, of an encoder-decoder's source, and of the tokenizer.
        golden: File of golden transcripts, or None.
        ids_only: Reason for missing tokenizer graphs; None if they exist.
        session_options: Configuration entries for each session.
        onnxruntime: Version of ONNX Runtime at export.
        oldest_onnxruntime: Oldest version that runs the graphs.
        pass_boundaries: Cache lengths, ascending, that no pass may cross.
    """

    ops: str
    graphs: tuple[HostGraph, ...]
    golden: str | None
    ids_only: str | None
    session_options: dict[str, str]
    onnxruntime: str
    oldest_onnxruntime: str
    pass_boundaries: tuple[int, ...] = field(default=(), metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if self.ops not in GRAPH_VARIANTS:
            raise ValueError(f"ops must be one of {', '.join(GRAPH_VARIANTS)}, got '{self.ops}'")
        for name in ("ids_only", "onnxruntime", "oldest_onnxruntime"):
            check_single_line(name, getattr(self, name))
        if any(a >= b for a, b in pairwise((0, *self.pass_boundaries))):
            raise ValueError("pass_boundaries must be at least 1 and ascend")
        names = {graph.name for graph in self.graphs}
        if len({(graph.name, graph.num_draft_tokens) for graph in self.graphs}) < len(self.graphs):
            raise ValueError("graphs must not repeat a graph")
        round_graphs = names - TEXT_GRAPHS - {"open"}
        if round_graphs not in ({"round"}, {"draft", "accept"}, {"draft", "accept", "fuse"}):
            raise ValueError(
                "graphs must have either round or both draft and accept, and fuse only with these"
            )
        text_graphs = TEXT_GRAPHS if self.ids_only is None else set()
        if names & TEXT_GRAPHS != text_graphs:
            raise ValueError("ids_only must be null if and only if graphs has encode and decode")

    @property
    def files(self) -> list[str]:
        """All files in the hosts folder."""
        golden = [] if self.golden is None else [self.golden]
        return [graph.file for graph in self.graphs] + golden
