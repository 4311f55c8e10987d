"""Manifests of small bundles, and a bundle of random files for tests that do not run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specedge import bundle as b
from specedge.bundle import manifest as m
from specedge.bundle.integrity import file_entry
from specedge.bundle.reports import ParityReport
from specedge.sampling_options import RecommendedSampling

PARITY = ParityReport(
    structure_error=1e-15,
    logits_error=1e-6,
    cache_error=1e-7,
    float32_logits_error=1e-6,
    float32_cache_error=1e-7,
    error_ratio=1.2,
    tolerance=None,
    logits_std=3.0,
    num_positions=32,
    num_left_out=0,
    invariant_lengths=(1, 2),
    versions={"torch": "2.13.0"},
)
CAPACITY = 40
STATES = (
    *m.key_value_states(0, (2, 4), (2, 4), "float32"),
    *m.key_value_states(1, (2, 4), (2, 4), "float32"),
)


def make_model(role: str) -> m.ModelEntry:
    return m.ModelEntry(
        source=m.CheckpointSource(f"some/{role}", "abc", "apache-2.0"),
        architecture="gpt2",
        num_parameters=10,
        num_experts=0,
        vocab_size=50,
        padded_vocab_size=64,
        context_length=32,
        dtype="float32",
        weights_dtype="float16",
        capacity=CAPACITY,
        states=STATES,
        weights=f"{role}/weights.bin",
        token_ids=None,
        signatures=m.signatures(STATES, CAPACITY, 64),
        graphs=(
            m.GraphEntry("decoder", "onnx", None, "chosen_logits", f"{role}/decoder.onnx"),
            m.GraphEntry("verify", "onnx", 5, "with_logits", f"{role}/decoder.onnx"),
        ),
        parity={"onnx": PARITY},
        quantization={},
    )


def write_model(folder: Path, role: str, graphs, max_invariant_length: int, **fields):
    """Write graphs by name, which may have weights; return the model's entry with these fields."""
    for name, graph in graphs.items():
        signature = fields["signatures"][m.signature_name(name)]
        graph.save(folder / role / f"{name}.onnx", signature)
    (folder / role / "weights.bin").write_bytes(bytes(64))
    invariant_lengths = tuple(range(1, max_invariant_length + 1))
    return replace(
        make_model(role),
        source=m.CheckpointSource(f"some/{role}", None, None),
        weights_dtype="float32",
        graphs=tuple(
            m.GraphEntry(name, "onnx", None, m.signature_name(name), f"{role}/{name}.onnx")
            for name in graphs
        ),
        parity={"onnx": replace(PARITY, invariant_lengths=invariant_lengths)},
        **fields,
    )


def make_bundle(folder: Path, weights_size: int = 100) -> b.Bundle:
    """Write the files and the manifest."""
    files = {
        f"{role}/{name}": size
        for role in ("target", "draft")
        for name, size in (("weights.bin", weights_size), ("decoder.onnx", 30))
    }
    files["tokenizer.json"] = 20
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((bytes(range(251)) * (size // 251 + 1))[:size])
    models = {role: make_model(role) for role in ("target", "draft")}
    return write_manifest(folder, models, end_tokens=(0,))


def write_manifest(folder: Path, models: dict[str, m.ModelEntry], **fields) -> b.Bundle:
    """Write the manifest of models and a tokenizer in a folder."""
    files = {"tokenizer.json"}
    for model in models.values():
        files |= {model.weights, *(graph.file for graph in model.graphs)}
        files |= {model.token_ids} - {None}
    bundle = b.Bundle(
        format=b.FORMAT,
        specedge_version="0.1.0",
        num_draft_tokens=4,
        tokenizer="tokenizer.json",
        chat_template=None,
        special_tokens={"eos_token": "</s>"},
        default_sampling=RecommendedSampling(),
        models=models,
        hosts=None,
        files={name: file_entry(folder / name) for name in sorted(files)},
        **fields,
    )
    (folder / b.MANIFEST).write_text(bundle.to_json(), "utf-8")
    return bundle
