"""Host graphs of a bundle, written beside its models and listed in its manifest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from specedge import store
from specedge.bundle import FORMAT, MANIFEST, Bundle
from specedge.bundle_files import describe
from specedge.declared import whole
from specedge.errors import ExportError
from specedge.manifest import File, HostGraph
from specedge.signature import Signature, Tensor

from ..writing import destination
from .rounds import check_fused, fused
from .split import accept, draft

LAYOUTS = ("auto", "fused", "split")


@dataclass(frozen=True)
class _Made:
    """A graph, the file that it goes to, its part in a round and its K."""

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
) -> Bundle:
    """Give a bundle graphs of a round, in place of those that it has; in `output`, a copy of it.

    `num_draft_tokens` are those of "fused" rounds, one graph each, by default the bundle's own
    number; "split" graphs are for any. "auto" is fused, but where each draft step would copy large
    caches or packed weights.

    Raises BundleError, or ExportError before anything is changed.
    """
    found = Bundle.read(store.find(bundle))
    store.check_large_files(found)
    if output is None:
        if found.folder.resolve() == store.embedded().resolve():
            raise ExportError("the embedded pair is a part of specedge; give --output FOLDER")
        return _embed(found, num_draft_tokens, layout)
    with destination(Path(output)) as work:
        for name in (MANIFEST, *found.files):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found.path(name), work / name)
        made = _embed(Bundle.read(work), num_draft_tokens, layout)
    return made.at(Path(output))


def _embed(bundle: Bundle, ks: Iterable[int], layout: str) -> Bundle:
    ops = {role: model.cpu_ops for role, model in bundle.models.items()}
    ks = sorted({*ks} or {bundle.num_draft_tokens})
    whole("num_draft_tokens", ks[0], 1)
    if room := [k for k in ks if k > bundle.num_draft_tokens]:
        raise ExportError(
            f"the caches have room for rounds of {bundle.num_draft_tokens} draft tokens, not of "
            f"{room[0]}; export the pair with --num-draft-tokens {room[0]}"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout is one of {', '.join(LAYOUTS)}, got {layout!r}")
    made = _fused(bundle, ks, ops, layout == "auto") if layout != "split" else None
    return _write(bundle, made or _split(bundle, ops), ops["target"])


def _fused(
    bundle: Bundle, ks: Iterable[int], ops: Mapping[str, str], or_none: bool
) -> list[_Made] | None:
    """Rounds in one graph; nothing or an ExportError where that cannot be."""
    try:
        if why := check_fused(bundle):
            raise ExportError(why)
        return [
            _Made(fused(bundle.folder, bundle, k, ops), _file(bundle, k), "round", k) for k in ks
        ]
    except ExportError as error:
        if or_none:
            return None
        raise ExportError(f"{error}; take --layout split") from error


def _split(bundle: Bundle, ops: Mapping[str, str]) -> list[_Made]:
    return [
        _Made(draft(bundle.folder, bundle, ops["draft"]), "draft.onnx", "draft"),
        _Made(accept(bundle), "accept.onnx", "accept"),
    ]


def _file(bundle: Bundle, num_draft_tokens: int) -> str:
    own = num_draft_tokens == bundle.num_draft_tokens
    return "round.onnx" if own else f"round-{num_draft_tokens}.onnx"


def _write(bundle: Bundle, made: list[_Made], ops: str) -> Bundle:
    """Write the graphs, then the manifest, which lists at no time what is not there."""
    old = {graph.file for graph in bundle.hosts}
    files = {name: file for name, file in bundle.files.items() if name not in old}
    without = replace(bundle, hosts=(), files=files)
    hosts = tuple(_entry(one, ops) for one in made)
    try:
        with tempfile.TemporaryDirectory(dir=bundle.folder, prefix=".embed-") as work:
            described = {one.file: _saved(one, Path(work)) for one in made}
            new = replace(bundle, format=FORMAT, hosts=hosts, files=files | described)
            if old:
                _put(without.to_json(), Path(work), bundle.folder)
            for file in described:
                os.replace(Path(work, file), bundle.folder / file)
            _put(new.to_json(), Path(work), bundle.folder)
    except OSError as error:
        raise ExportError(
            f"{bundle.folder} cannot be written to: {error.strerror}; give --output FOLDER"
        ) from error
    for name in old - described.keys():
        bundle.path(name).unlink(missing_ok=True)
    return new.at(bundle.folder)


def _saved(made: _Made, work: Path) -> File:
    ir.save(made.model, work / made.file)
    return describe(work / made.file)


def _put(manifest: str, work: Path, folder: Path) -> None:
    (work / MANIFEST).write_text(manifest, "utf-8")
    os.replace(work / MANIFEST, folder / MANIFEST)


def _entry(made: _Made, ops: str) -> HostGraph:
    graph = made.model.graph
    signature = Signature(*(tuple(map(_tensor, x)) for x in (graph.inputs, graph.outputs)))
    return HostGraph(made.name, made.num_draft_tokens, ops, signature, made.file)


def _tensor(value: ir.Value) -> Tensor:
    assert value.name is not None
    assert value.dtype is not None
    assert value.shape is not None
    parts = value.name.split(".")  # draft.past_key_values.0.key
    role, buffer = value.name, None
    if len(parts) == 4:
        role, buffer = "cache", ".".join((parts[0], *parts[2:]))
    shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
    return Tensor(value.name, role, buffer, str(value.dtype.numpy()), shape)
