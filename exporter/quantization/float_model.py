"""Exported and verified float model, from which other graph variants are derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from specedge.bundle.graph_variants import (
    GRAPH_VARIANTS,
    OPS,
    attention_ops,
    cache_dtype,
    compute_dtype,
    has_int8_caches,
    is_reduced_precision,
)
from specedge.bundle.manifest import ENCODER, OPEN, ModelEntry
from specedge.bundle.precision import QUANTIZED_DTYPES
from specedge.bundle.reports import QuantizationReport

from ..graph import fusion, graphs, rewrites
from ..graph.external_data import STORED, LazyWeights
from ..graph.graphs import UNCACHED, GraphFile, variant_signature
from ..graph.half_precision import cast_outputs, convert_caches, convert_graph
from ..graph.int8_caches import quantize_caches
from ..graph.opset import save_graph
from ..graph.repeated_rows import remove_repeated_rows
from ..graph.shared_bytes import share_embeddings
from ..tracing.geometry import Geometry
from ..verification.fused_states import FusedStates, FuseGraph, random_states
from ..verification.runner import Runner
from ..verification.source_states import NUM_TOKENS, SourceGraphs, SourceStates
from .experts import NO_EXCLUSIONS, ExcludedWeights, load_graph

VariantReport = tuple[QuantizationReport, tuple[int, ...]]  # with the invariant pass lengths


@dataclass(frozen=True)
class FloatModel:
    """Exported float model.

    Attributes:
        role: "target" or "draft".
        model: Manifest entry.
        folder: Folder of its graphs.
        head: Tokens of its logits if reduced, [n].
        original: The model before a change of basis.
        is_self_draft: True if it is a target's first layers.
        lazy: Weights by offset in the weights file, which lacks those of a large model that is
            quantized.
        cache_scales: Scales of int8 caches by name, [H, 1, D] each.
        fused: Hidden states of the texts that a draft reads; None for random ones.
    """

    role: str
    model: ModelEntry
    folder: Path
    head: np.ndarray | None = None
    original: FloatModel | None = None
    is_self_draft: bool = False
    lazy: LazyWeights = field(default_factory=dict)
    cache_scales: Mapping[str, np.ndarray] = field(default_factory=dict)
    fused: FusedStates | None = None

    @property
    def geometry(self) -> Geometry:
        model = self.model
        sizes = model.context_length, model.capacity, model.padded_vocab_size
        return Geometry(*sizes, model.layers, model.constants, model.encoder, model.hidden)

    @property
    def ops(self) -> list[str]:
        """Graph variants without a type suffix."""
        return [ops for ops in OPS if ops in self.model.parity]

    def reduced_variants(self, weights_dtype: str, suffixes: Sequence[str]) -> list[str]:
        """Return the reduced-precision graph variants for a weights type and further suffixes."""
        names = [*self.ops, *(f"{ops}-{suffix}" for suffix in suffixes for ops in self.ops)]
        return [
            ops
            for ops in names
            if ops in GRAPH_VARIANTS and is_reduced_precision(ops, weights_dtype)
        ]

    @property
    def files(self) -> list[GraphFile]:
        """Graph files, the same in all graph variants."""
        return [
            GraphFile(
                graph.name,
                graph.length,
                graph.signature != "caches_alone",
                graph.file.rpartition("/")[2].partition(graph.name)[0],
            )
            for graph in self.model.graphs
            if graph.ops == self.ops[0] and graph.name not in UNCACHED
        ]

    @property
    def other_files(self) -> list[GraphFile]:
        """Files of graphs without caches: encoder and constant states, and fused hidden states."""
        prefix = self.files[0].prefix
        names = filter(self.model.has_graph, UNCACHED)
        return [GraphFile(name, None, prefix=prefix) for name in names]

    @property
    def other_folder(self) -> Path:
        """Folder of the graphs without caches, which keep their basis."""
        return (self.original or self).folder

    def load_other(self, file: GraphFile) -> ir.Model:
        """Load a graph without caches."""
        lazy = (self.original or self).lazy
        return load_graph(self.other_folder / file.file_name(self.ops[0]), lazy)

    def write_others(
        self, folder: Path, ops: str, change: Callable[[ir.Model], None] | None = None
    ) -> None:
        """Write the graphs without caches in a graph variant.

        They compute in float32; only the states have the type of the variant. `change` rewrites a
        graph first.
        """
        for file in self.other_files:
            graph_model = self.load_other(file)
            if change is not None:
                change(graph_model)
            if file.name == OPEN:
                cast_outputs(graph_model, cache_dtype(ops))
            path = folder / file.file_name(ops)
            if path != self.other_folder / file.file_name(self.ops[0]):
                save_graph(graph_model, path)

    def runner(self, folder: Path, ops: str) -> Runner:
        """Return a runner of a graph variant in a folder."""
        if self.model.encoder is None:
            return Runner(folder, self.files, self.geometry, ops, **self._source)
        # Encoders of all types of a graph variant have the same weights.
        source = self._source_options(self._source_graphs(folder, attention_ops(ops)))
        return Runner(folder, self.files, self.geometry, ops, **source)

    @cached_property
    def sources(self) -> SourceGraphs:
        """Encoder of an encoder-decoder."""
        return self._source_graphs(self.other_folder, self.ops[0])

    @cached_property
    def _source(self) -> dict[str, Any]:
        """Options of runners of this model."""
        if self.model.hidden is not None and self.model.reads_hidden:
            if self.fused is not None:
                return {"fused": self.fused}
            fuse = self.fuse_graph(self.other_folder, self.ops[0])
            return {"fused": FusedStates(fuse(random_states(self.model.hidden)[0]))}
        return {} if self.model.encoder is None else self._source_options(self.sources)

    def fuse_graph(self, folder: Path, ops: str) -> FuseGraph:
        """Open the graph that fuses hidden states for a draft, if it has one, in a folder."""
        return FuseGraph(*(folder / file.file_name(ops) for file in self.other_files))

    def _source_options(self, sources: SourceGraphs) -> dict[str, Any]:
        """Return the options of runners of an encoder-decoder."""
        assert self.model.encoder is not None
        sample = sources.states(self.source(np.arange(NUM_TOKENS)))
        if self.model.encoder.reads_speech:
            return {"source": sample, "open_source": lambda tokens: sample}
        return {"source": sample, "open_source": sources.states}

    def _source_graphs(self, folder: Path, ops: str) -> SourceGraphs:
        """Open the encoder in a folder."""
        *own, open_ = (folder / file.file_name(ops) for file in self.other_files)
        # A draft model without an encoder reads the target's hidden states.
        encoder = own[0] if own else next((folder.parent / "target").glob(f"{ENCODER}*.onnx"))
        names = [f"present.{state.name}" for state in self.model.constants]
        is_quantized = folder != self.other_folder or self.model.weights_dtype in QUANTIZED_DTYPES
        return SourceGraphs(encoder, open_, names, packed=is_quantized)

    def sampled_states(self) -> np.ndarray:
        """Return hidden states of the target, of texts or random ones. [n, F]"""
        assert self.model.hidden is not None
        if self.fused is not None and self.fused.hidden is not None:
            return self.fused.hidden
        rows: np.ndarray = random_states(self.model.hidden)[0]
        return rows

    def source(self, tokens: np.ndarray) -> np.ndarray:
        """Return the source of a text: its tokens, [T] -> [N], or noise, as it has no speech."""
        entry = self.model.encoder
        assert entry is not None
        if entry.num_mel_bins is None:
            return tokens[: entry.max_length]
        shape = (entry.num_mel_bins, entry.max_length)
        return np.random.default_rng(0).standard_normal(shape, np.float32)

    def source_inputs(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs of passes of an encoder-decoder for a source, [N]."""
        states: SourceStates = self._source["open_source"](tokens)
        return states.inputs(self.geometry)

    def decoder_runner(self, ops: str, others: Sequence[GraphFile] = ()) -> Runner:
        """Return a runner of the source graph of a graph variant, and of other files."""
        files = [file.source for file in self.files if file.length is None]
        return Runner(self.folder, [*files, *others], self.geometry, ops, self.lazy, **self._source)

    def decoder(self, ops: str) -> Path:
        """Return the path of a graph variant's source graph, for any pass length."""
        (decoder,) = (file for file in self.files if file.length is None)
        return self.folder / decoder.source.file_name(attention_ops(ops))

    def load(self, ops: str, excluded: ExcludedWeights = NO_EXCLUSIONS) -> ir.Model:
        """Load the source graph of a graph variant."""
        return load_graph(self.decoder(ops), self.lazy, excluded)

    def write(
        self,
        graph_model: ir.Model,
        folder: Path,
        ops: str,
    ) -> None:
        """Write the graph files of a graph variant from its decoder."""
        if has_int8_caches(ops):
            quantize_caches(graph_model, self.cache_scales)
        else:
            convert_types(graph_model, ops)
        graphs.write_graphs(graph_model, folder, self.files, ops)

    def with_reports(self, reports: dict[str, VariantReport], weights_dtype: str) -> ModelEntry:
        """Return the manifest entry with new weights or graph variants, and their reports."""
        model, folder = self.model, self.model.weights.rpartition("/")[0]
        parity, quantization = dict(model.parity), dict(model.quantization)
        entries, signatures_ = list(model.graphs), dict(model.signatures)
        for ops, (report, invariant) in reports.items():
            if ops not in parity:
                files = (*self.files, *self.other_files)
                entries += [file.entry(folder, ops) for file in files]
            parity[ops] = replace(parity[attention_ops(ops)], invariant_lengths=invariant)
            quantization[ops] = report
            signatures_ |= {
                variant_signature(name, ops): signature
                for name, signature in model.format_signatures(ops).items()
            }
        return replace(
            model, weights_dtype=weights_dtype, signatures=signatures_, graphs=tuple(entries),
            parity=parity, quantization=quantization,
        )  # fmt: skip


def convert_types(graph_model: ir.Model, ops: str) -> None:
    """Convert a float32 decoder to the types of a graph variant, in place."""
    if (dtype := compute_dtype(ops)) != "float32":
        rewrites.fuse_sigmoids(graph_model)  # one kernel launch on a GPU instead of four
        if attention_ops(ops) == "gqa":
            fusion.fuse(graph_model, is_for_gpu=True)
            remove_repeated_rows(graph_model.graph)
        convert_graph(graph_model, STORED[dtype][1])
        if attention_ops(ops) == "gqa":
            share_embeddings(graph_model)
    elif (dtype := cache_dtype(ops)) != "float32":
        convert_caches(graph_model, STORED[dtype][1])
