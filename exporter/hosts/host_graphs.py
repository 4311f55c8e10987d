"""Embedding of host graphs in a bundle, listed in its manifest."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import onnxruntime

from specedge.attention_kernels import pass_boundaries
from specedge.bundle import MANIFEST, Bundle, store
from specedge.bundle.graph_scan import weights_of
from specedge.bundle.graph_variants import attention_ops
from specedge.bundle.hosts import HostFiles, HostGraph
from specedge.bundle.integrity import file_entry
from specedge.bundle.manifest import FUSE, ModelEntry
from specedge.bundle.precision import OLDEST_ONNXRUNTIME, QUANTIZED_DTYPES
from specedge.bundle.signature import Port, Signature
from specedge.constant_folding import FOLDING_LIMIT
from specedge.destination import destination
from specedge.errors import ExportError
from specedge.int8_products import UNSIGNED_OPTION
from specedge.option_specs import check_integer

from ..graph.opset import OLD_OPSET, lower_opset
from .round_graphs import (
    PLAIN_K,
    RoundBuilder,
    accept_graph,
    check_fused,
    draft_graph,
    fuse_graph,
)
from .source_graph import source_graph
from .tokenizer_graphs import tokenizer_graphs

# draft.past_key_values.0.key, draft.2.present.0.key, target.present.0.cross.key
_STATE = re.compile(r"(?P<model>draft|target)(\.[0-9]+)?\.(past_key_values|present)\.(?P<state>.+)")
LAYOUTS = ("auto", "fused", "split")
GOLDEN = "golden.json"
# Threads that spin after a run would occupy the cores of the next session's run.
SESSION_OPTIONS = dict([("session.force_spinning_stop", "1"), FOLDING_LIMIT])
# On CPUs without VNNI products of signed and unsigned bytes saturate without this option.
INT8_OPTIONS = SESSION_OPTIONS | {UNSIGNED_OPTION: "1"}
Golden = Callable[[Bundle, Sequence[int]], str]


@dataclass(frozen=True)
class _HostGraphFile:
    """Host graph with its file name, its name and its K."""

    model: ir.Model
    file: str
    name: str
    num_draft_tokens: int | None = None


def embed(
    bundle: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    num_draft_tokens: Iterable[int] = (),
    layout: str = "auto",
    golden: Golden | None = None,
) -> Bundle:
    """Add host graphs to a bundle, or to a copy of it; replace earlier ones.

    A bundle without a draft model gets a round graph for plain decoding.

    Args:
        bundle: Name or folder of a bundle; the default bundle if None.
        output: Folder of the copy; None changes the bundle in place.
        num_draft_tokens: K of each fused round graph, by default the bundle's number.
        layout: "fused" for one graph per round, "split" for separate graphs of draft steps and of
            the accept rule, for any K; "auto" for fused graphs unless they would copy large caches
            or packed weights in each draft step, the draft reads hidden states, or a head is wide.
        golden: Returns golden transcripts of a bundle for these K, such as
            `specedge.verification.transcripts.transcripts`; None for no transcripts.

    Returns:
        The bundle with host graphs.

    Raises:
        BundleError: The bundle is damaged.
        ExportError: The graphs cannot be built; the bundle is unchanged.
        ValueError: `layout` is unknown.
    """
    source = Bundle.read(store.find_bundle(bundle))
    numbers = [*num_draft_tokens]
    if output is None:
        if source.folder.resolve() == store.embedded_folder().resolve():
            raise ExportError("the embedded pair is part of specedge; specify --output FOLDER")
        store.verify_large_files(source)
        return _embed(source, numbers, layout, golden)
    with destination(Path(output)) as work:
        store.verify_large_files(source)
        source.copy_to(work)
        result = _embed(Bundle.read(work), numbers, layout, golden)
    return result.at(Path(output))


def _draft_obstacle(draft: ModelEntry) -> str | None:
    """Return the reason why host graphs cannot contain a draft model, or None."""
    if draft.tokenizer is not None:
        return "has another tokenizer than the target, and host graphs translate no tokens"
    if draft.mask_token is not None:
        return (
            "drafts all tokens of a round in one pass (PARD), and host graphs draft one token per "
            "pass"
        )
    return None


def _embed(
    bundle: Bundle, num_draft_tokens: list[int], layout: str, golden: Golden | None
) -> Bundle:
    ops = {role: model.cpu_ops for role, model in bundle.models.items()}
    if bundle.draft is not None and (reason := _draft_obstacle(bundle.draft)):
        raise ExportError(
            f"{bundle.draft.source.id} {reason}; export the target with another --draft, or without"
        )
    if bundle.draft is None and (layout == "split" or num_draft_tokens):
        option = "-k" if num_draft_tokens else "--layout split"
        raise ExportError(
            f"{option} needs a draft model, which this bundle does not have; omit it for "
            "plain decoding, or export the target again with --draft"
        )
    if bundle.reads_speech:  # a transcript would contain audio
        golden = None
    default_k = PLAIN_K if bundle.draft is None else bundle.num_draft_tokens
    ks = sorted({*num_draft_tokens} or {default_k})
    check_integer("num_draft_tokens", ks[0], 1)
    if larger_ks := [k for k in ks if k > bundle.num_draft_tokens]:
        raise ExportError(
            f"the caches are sized for rounds of {bundle.num_draft_tokens} draft tokens, not "
            f"{larger_ks[0]}; export the pair with --num-draft-tokens {larger_ks[0]}"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
    boundaries = {
        end
        for role, name in ops.items()
        for end in pass_boundaries(bundle.models[role].states, name)
    }
    obstacle = None if bundle.draft is None else check_fused(bundle, boundaries)
    if obstacle and layout == "fused":
        raise ExportError(f"{obstacle}; use --layout split")
    if bundle.draft is None:
        model = RoundBuilder(bundle, PLAIN_K, ops).plain_model()
        host_graphs = [_HostGraphFile(model, "round.onnx", "round", PLAIN_K)]
    elif obstacle or layout == "split":
        host_graphs = [
            _HostGraphFile(draft_graph(bundle, ops["draft"]), "draft.onnx", "draft"),
            _HostGraphFile(accept_graph(bundle), "accept.onnx", "accept"),
        ]
        if bundle.draft_model.has_graph(FUSE):
            fuse = fuse_graph(bundle, ops["draft"])
            host_graphs.append(_HostGraphFile(fuse, "fuse.onnx", FUSE))
    else:
        host_graphs = [
            _HostGraphFile(
                RoundBuilder(bundle, k, ops).fused_model(),
                "round.onnx" if k == bundle.num_draft_tokens else f"round-{k}.onnx",
                "round",
                k,
            )
            for k in ks
        ]
    if bundle.target.encoder is not None:
        host_graphs.append(_HostGraphFile(source_graph(bundle, ops), "open.onnx", "open"))
    text = tokenizer_graphs(bundle.path(bundle.tokenizer))
    if not isinstance(text, str):
        host_graphs += [_HostGraphFile(model, f"{name}.onnx", name) for name, model in text.items()]
    has_integers = any(model.weights_dtype in QUANTIZED_DTYPES for model in bundle.models.values())
    for graph in host_graphs:
        lower_opset(graph.model)
    has_new_opset = any(graph.model.graph.opset_imports[""] > OLD_OPSET for graph in host_graphs)
    has_new_opset |= any(attention_ops(name) != "gqa" for name in ops.values())
    compute = "integers" if has_integers else "onnx" if has_new_opset else "gqa"
    compute = "experts" if _has_experts(bundle, ops) else compute
    hosts = HostFiles(
        ops["target"],
        tuple(map(_host_graph_entry, host_graphs)),
        GOLDEN if golden else None,
        text if isinstance(text, str) else None,
        INT8_OPTIONS if has_integers else SESSION_OPTIONS,
        onnxruntime.__version__,
        OLDEST_ONNXRUNTIME[compute],
        tuple(sorted(boundaries)),
    )
    other_files = {GOLDEN: golden(bundle, ks)} if golden else {}
    return _write(bundle, hosts, host_graphs, other_files)


def _has_experts(bundle: Bundle, ops: Mapping[str, str]) -> bool:
    """Return True if a graph has quantized experts, in a QMoE node."""
    files = (model.graph("decoder", ops[role]).file for role, model in bundle.models.items())
    weights = (weight for file in files for weight in weights_of(bundle, file))
    return any("QMoE" in readers for weight in weights for _, readers in weight.forms)


def _write(
    bundle: Bundle, hosts: HostFiles, graphs: list[_HostGraphFile], texts: Mapping[str, str]
) -> Bundle:
    """Write the graphs, then the manifest, which never lists files that do not exist."""
    old = {*bundle.hosts.files} if bundle.hosts else set()
    files = {name: file for name, file in bundle.files.items() if name not in old}
    without = replace(bundle, hosts=None, files=files)
    for name in hosts.files:
        if name not in bundle.files and os.path.lexists(bundle.folder / name):
            raise ExportError(
                f"{bundle.folder} contains {name}, which is not part of the bundle; "
                "specify --output FOLDER"
            )
    try:
        with tempfile.TemporaryDirectory(dir=bundle.folder, prefix=".embed-") as work:
            for graph in graphs:
                ir.save(graph.model, Path(work, graph.file))
            for name, text in texts.items():
                Path(work, name).write_text(text, "utf-8")
            described = {name: file_entry(Path(work, name)) for name in hosts.files}
            new = replace(bundle, hosts=hosts, files=files | described)
            if old:
                _replace_manifest(without.to_json(), Path(work), bundle.folder)
            for file in described:
                os.replace(Path(work, file), bundle.folder / file)
            _replace_manifest(new.to_json(), Path(work), bundle.folder)
    except OSError as error:
        raise ExportError(
            f"{bundle.folder} cannot be written to: {error.strerror}; specify --output FOLDER"
        ) from error
    for name in old - described.keys():
        bundle.path(name).unlink(missing_ok=True)
    return new.at(bundle.folder)


def _replace_manifest(manifest: str, work: Path, folder: Path) -> None:
    (work / MANIFEST).write_text(manifest, "utf-8")
    os.replace(work / MANIFEST, folder / MANIFEST)


def _host_graph_entry(host_graph: _HostGraphFile) -> HostGraph:
    graph = host_graph.model.graph
    signature = Signature(*(tuple(map(_port, x)) for x in (graph.inputs, graph.outputs)))
    return HostGraph(host_graph.name, host_graph.num_draft_tokens, signature, host_graph.file)


def _port(value: ir.Value) -> Port:
    assert value.name is not None
    assert value.dtype is not None
    assert value.shape is not None
    role, state = value.name, None
    if match := _STATE.fullmatch(value.name):
        role, state = "state", f"{match['model']}.{match['state']}"
    shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
    dtype = "string" if value.dtype == ir.DataType.STRING else str(value.dtype.numpy())
    return Port(value.name, role, state, dtype, shape)
