"""A model that was written and compared, which other graphs are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specedge.bundle.manifest import ModelEntry, signatures
from specedge.bundle.op_sets import (
    OP_SETS,
    OPS,
    attention_ops,
    cache_dtype,
    compute_dtype,
    is_reduced_precision,
)
from specedge.bundle.reports import QuantizationReport

from ..graph import graphs
from ..graph.graphs import GraphFile, op_set_signature
from ..graph.half_precision import convert_caches, convert_graph
from ..graph.weights import STORED
from ..tracing.geometry import Geometry
from ..verification.runner import Runner

Report = tuple[QuantizationReport, tuple[int, ...]]  # and the T whose rows keep their bits


@dataclass(frozen=True)
class Written:
    """A model of floats, and the folder where it lies.

    `head` [n] are the tokens of its logits where these are not all. In another basis it has the
    folder where it is as it was exported as `original`. A self-draft is a target's first layers.
    """

    role: str
    model: ModelEntry
    folder: Path
    head: np.ndarray | None = None
    original: Path | None = None
    is_self_draft: bool = False

    @property
    def geometry(self) -> Geometry:
        model = self.model
        sizes = model.context_length, model.cache.capacity, model.padded_vocab_size
        return Geometry(*sizes, model.cache.layers)

    @property
    def ops(self) -> list[str]:
        """Its op sets, but for those with a type."""
        return [ops for ops in OPS if ops in self.model.parity]

    def rounded(self, weights_dtype: str, kinds: Sequence[str]) -> list[str]:
        """What is made of it: op sets over weights of a type, and with types of their own."""
        wanted = [*self.ops, *(f"{ops}-{kind}" for kind in kinds for ops in self.ops)]
        return [
            ops for ops in wanted if ops in OP_SETS and is_reduced_precision(ops, weights_dtype)
        ]

    @property
    def lengths(self) -> list[GraphFile]:
        """Its files, by what they are called in any op set."""
        return [
            GraphFile(
                graph.name,
                graph.length,
                graph.signature != "caches_alone",
                graph.file.rpartition("/")[2].partition(graph.name)[0],
            )
            for graph in self.model.graphs
            if graph.ops == self.ops[0]
        ]

    def runner(self, folder: Path, ops: str) -> Runner:
        return Runner(folder, self.lengths, self.geometry, ops)

    def decoder_runner(self, ops: str) -> Runner:
        """Run the file that the graphs of an op set are made from."""
        lengths = [one.source for one in self.lengths if one.length is None]
        return Runner(self.folder, lengths, self.geometry, ops)

    def decoder(self, ops: str) -> Path:
        """Return the file, for any length, that the graphs of an op set are made from."""
        (decoder,) = (one for one in self.lengths if one.length is None)
        return self.folder / decoder.source.file(attention_ops(ops))

    def write(self, made: ir.Model, folder: Path, ops: str) -> None:
        """Write the files of an op set that was made of a decoder."""
        if (kind := cache_dtype(ops)) != "float32":
            (convert_graph if kind == compute_dtype(ops) else convert_caches)(made, STORED[kind][1])
        graphs.write_graphs(made, folder, self.lengths, ops)

    def with_reports(self, reports: dict[str, Report], weights_dtype: str) -> ModelEntry:
        """The manifest with other weights, or further op sets, and what they cost."""
        model, place = self.model, self.model.weights.rpartition("/")[0]
        parity, quantization = dict(model.parity), dict(model.quantization)
        entries, known = list(model.graphs), dict(model.signatures)
        for ops, (report, held) in reports.items():
            if ops not in parity:
                entries += [length.entry(place, ops) for length in self.lengths]
            parity[ops] = replace(parity[attention_ops(ops)], invariant_lengths=held)
            quantization[ops] = report
            own = signatures(model.cache_layout(ops), model.padded_vocab_size)
            known |= {op_set_signature(kind, ops): signature for kind, signature in own.items()}
        return replace(
            model, weights_dtype=weights_dtype, signatures=known, graphs=tuple(entries),
            parity=parity, quantization=quantization,
        )  # fmt: skip
