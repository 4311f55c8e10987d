"""Command `specedge inspect`."""

from __future__ import annotations

import json

import click

from specedge.bundle import Bundle
from specedge.bundle.graph_variants import OPS, cache_dtype, compute_dtype, has_compute_type
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.reports import ParityReport
from specedge.cli import options
from specedge.cli.terminal import progress_bar, sanitize_line
from specedge.sampling_options import RecommendedSampling


@click.command()
@options.bundle
@click.option("--check", is_flag=True, help="Verify the hashes of all files.")
@click.option("--memory", is_flag=True, help="Estimate the peak memory instead.")
@options.device
@options.ops
@options.as_json
def inspect(
    bundle: str | None, check: bool, memory: bool, device: str, ops: str, as_json: bool
) -> None:
    """Show the contents of a bundle."""
    from specedge.bundle import store

    manifest = Bundle.read(store.find_bundle(bundle))
    if check:
        _check(manifest)
    if memory:
        _memory(manifest, device, ops, as_json)
        return
    click.echo(
        manifest.to_json() if as_json else "\n".join(map(sanitize_line, _lines(manifest))),
        nl=not as_json,
    )


def _memory(bundle: Bundle, device: str, ops: str, as_json: bool) -> None:
    """Print the estimated peak memory, its parts, and the available memory."""
    from specedge.runtime.backend.memory import available_bytes, format_bytes
    from specedge.runtime.backend.sessions import Device
    from specedge.runtime.requests.loader import memory_of

    if device != "auto":
        Device(device)  # raises DeviceError
    need, free = memory_of(bundle, ops), available_bytes()
    if as_json:
        click.echo(json.dumps({"peak": need.peak, "parts": need.parts, "free": free}))
        return
    lines = {
        f"peak for {bundle.context_length} tokens": format_bytes(need.peak),
        "available": "unknown" if free is None else format_bytes(free),
    }
    lines |= {f"  {name}": format_bytes(size) for name, size in need.parts.items()}
    for name, text in lines.items():
        click.echo(f"{name:28}{text:>10}")


def _check(bundle: Bundle) -> None:
    from rich.progress import DownloadColumn

    from specedge.bundle import store

    total = sum(file.size for file in bundle.files.values())
    with progress_bar("checking", total, DownloadColumn()) as (update, _):
        for name in bundle.files:
            bundle.check_hash(name, lambda size: update(advance=size))
    store.record_export(bundle)
    click.echo(f"verified all {len(bundle.files)} files", err=True)


def _lines(bundle: Bundle) -> list[str]:
    size = sum(file.size for file in bundle.files.values())
    lines = [
        f"bundle           {bundle.folder}",
        f"format           {bundle.format}, written by specedge {bundle.specedge_version}",
        f"size             {size / 1e6:.1f} MB in {len(bundle.files)} files",
        f"draft tokens     {bundle.num_draft_tokens}",
        f"end tokens       {', '.join(map(str, bundle.end_tokens)) or 'none'}",
        f"chat template    {'yes' if bundle.chat_template else 'no'}",
        f"default sampling {_sampling(bundle.default_sampling)}",
    ]
    for role, model in bundle.models.items():
        lines += ["", *_model_lines(bundle, role, model)]
    if bundle.draft is None:
        lines += ["", f"{'draft':16} none: suffix decoding"]
    return lines


def license(bundle: Bundle, role: str, model: ModelEntry) -> str:
    """Return the license stated by a checkpoint, and its license files."""
    return ", ".join((model.source.license or "not stated", *bundle.license_files(role)))


def _sampling(sampling: RecommendedSampling) -> str:
    if sampling.greedy:
        return "greedy"
    fields = (f"{name.replace('_', '-')} {value:g}" for name, value in vars(sampling).items())
    return ", ".join(fields)


def _columns(model: ModelEntry) -> str:
    if model.token_ids is not None:
        return f"LM head pruned to {model.padded_vocab_size}"
    return f"{model.padded_vocab_size} columns"


def _tokenizer_lines(bundle: Bundle, model: ModelEntry) -> list[str]:
    if model.tokenizer is None:
        return []
    return [
        f"  tokenizer      another one: {model.padded_vocab_size} of the target's "
        f"{bundle.target.vocab_size} tokens can be drafted"
    ]


def _model_lines(bundle: Bundle, role: str, model: ModelEntry) -> list[str]:
    source, keys = model.source, model.states[0].shape
    shared = " (the target's)" if role == "draft" and bundle.shares_weights else ""
    return [
        f"{role:16} {source.id}" + (f" at {source.revision}" if source.revision else ""),
        f"  license        {license(bundle, role, model)}",
        f"  architecture   {model.architecture}, {model.num_parameters / 1e6:.1f} M parameters,"
        f" {len(model.layers)} layers, {keys[1]} KV heads of {keys[3]}",
        f"  context        {model.context_length} tokens",
        f"  vocabulary     {model.vocab_size} tokens, {_columns(model)}",
        *_tokenizer_lines(bundle, model),
        f"  weights        {bundle.files[model.weights].size / 1e6:.1f} MB{shared}, stored as"
        f" {model.weights_dtype}, computed in {model.dtype}",
        f"  cache          {model.cache_size(model.cpu_ops) / 1e6:.1f} MB"
        f" for {model.capacity} rows",
        *_encoder_lines(model),
        *_mask_lines(model),
        *_hidden_lines(bundle, model),
        *(
            line
            for ops, parity in model.parity.items()
            for line in _graph_lines(model, ops, parity)
        ),
    ]


def _encoder_lines(model: ModelEntry) -> list[str]:
    if (encoder := model.encoder) is None:
        return []
    source = f"up to {encoder.max_length} tokens"
    if encoder.num_mel_bins is not None:
        source = f"spectrograms of {encoder.num_mel_bins} mel bins and {encoder.max_length} frames"
    size = model.cache_size(model.cpu_ops, "constant") / 1e6
    return [f"  encoder        {source}, {size:.1f} MB of cross-attention states"]


def _mask_lines(model: ModelEntry) -> list[str]:
    if model.mask_token is None:
        return []
    return [f"  drafts         in one pass, by mask token {model.mask_token}"]


def _hidden_lines(bundle: Bundle, model: ModelEntry) -> list[str]:
    if (hidden := model.hidden) is None:
        return []
    num_layers = len(bundle.target.layers)
    names = {num_layers: "the last layer's output", num_layers + 1: "the final norm's output"}
    inputs = [str(layer) for layer in hidden.layers if layer < num_layers]
    states = [f"inputs of layers {', '.join(inputs)}"] if inputs else []
    states += [names[layer] for layer in hidden.layers if layer in names]
    whose = "" if hidden.draft_size is None else "the target's "
    read = "" if hidden.draft_size is None else f", read as {hidden.draft_size}"
    return [f"  hidden states  {whose}{', '.join(states)}, {hidden.size} channels{read}"]


def _graph_lines(model: ModelEntry, ops: str, parity: ParityReport) -> list[str]:
    lengths = ", ".join(map(str, parity.invariant_lengths)) or "none"
    return [
        f"  {ops:14} {', '.join(graph.name for graph in model.graphs if graph.ops == ops)}",
        *(_own_type(model, ops) if ops not in OPS else ()),
        f"    parity       {model.describe_parity(ops)}; "
        f"standard deviation of logits {parity.logits_std:.1f}",
        f"    invariant    for pass lengths {lengths}",
    ]


def _own_type(model: ModelEntry, ops: str) -> list[str]:
    size = model.cache_size(ops) / 1e6
    if has_compute_type(ops):
        return [f"    computed in  {compute_dtype(ops)}, with a cache of {size:.1f} MB"]
    return [f"    caches in    {cache_dtype(ops)}, {size:.1f} MB"]
