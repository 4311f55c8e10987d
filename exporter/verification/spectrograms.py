"""Graph of log-mel spectrograms, compared with transformers' feature extractor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor

from specedge.bundle.manifest import (
    FEATURES,
    HOP_LENGTH,
    SAMPLING_RATE,
    ModelEntry,
    signature_name,
)
from specedge.bundle.precision import ERROR_MULTIPLE
from specedge.errors import ExportError

from ..checkpoint.checkpoints import Checkpoint
from ..graph.graphs import add_graph
from ..graph.log_mel import build_log_mel
from ..libraries import first_line, quiet
from .subgraph import open_session

CONFIG_FILE = "preprocessor_config.json"


def add_log_mel(model: ModelEntry, checkpoint: Checkpoint, folder: Path) -> ModelEntry:
    """Write the graph `features` of a model that reads spectrograms, and verify it.

    Args:
        model: Entry of the target.
        checkpoint: Checkpoint of the target, with the configuration of the feature extractor.
        folder: Folder of the bundle.

    Returns:
        The entry with the graph, unchanged if the model reads tokens.

    Raises:
        ExportError: The feature extractor is missing, not supported, or not equal to the graph.
    """
    if model.encoder is None or model.encoder.num_mel_bins is None:
        return model
    extractor = load_extractor(checkpoint)
    settings = {
        "feature_size": model.encoder.num_mel_bins,
        "n_samples": model.encoder.num_samples,
        "sampling_rate": SAMPLING_RATE,
        "hop_length": HOP_LENGTH,
        "dither": 0.0,
    }
    for name, expected in settings.items():
        actual = getattr(extractor, name)
        if actual != expected or type(actual) is not type(expected):
            raise ExportError(
                f"{checkpoint.role} {checkpoint.name}: its feature extractor has {name} {actual}; "
                f"the format has {expected}"
            )
    ops, base = model.cpu_ops, signature_name(FEATURES)
    graph = build_log_mel(extractor.mel_filters, extractor.n_fft, extractor.n_samples)
    signature = model.format_signatures(ops)[base]
    model = add_graph(model, folder, ops, FEATURES, base, signature, graph)
    check_log_mel(folder / model.graph(FEATURES, ops).file, extractor)
    return model


def check_log_mel(path: Path, extractor: WhisperFeatureExtractor) -> None:
    """Compare a graph with an extractor, which computes in float64 with NumPy, else in float32.

    Raises:
        ExportError: The graph's root mean square error is above `ERROR_MULTIPLE` times the
            extractor's in float32.
    """
    audio = _test_signal(extractor.n_samples)[None]
    exact = extractor._np_extract_fbank_features(audio.astype(np.float64), "cpu")
    expected = extractor._torch_extract_fbank_features(audio)
    session = open_session(path)
    (actual,) = session.run(None, {"audio": audio})
    error, bound = (np.sqrt(np.mean((array - exact) ** 2)) for array in (actual, expected))
    if not error <= ERROR_MULTIPLE * bound:
        raise ExportError(
            f"the graph '{FEATURES}' has an error of {error:.1e}, more than {ERROR_MULTIPLE:g} "
            f"times that of transformers' feature extractor, {bound:.1e}"
        )


def _test_signal(num_samples: int) -> NDArray[np.float32]:
    """Return noise that fades by three decades, then silence and a click. [num_samples]"""
    times = np.arange(num_samples) / num_samples
    noise = np.random.default_rng(0).normal(size=num_samples) * 10 ** (-4 * times) / 8
    signal = np.where(times < 0.75, noise, 0)
    signal[-1] = 1
    return np.clip(signal, -1, 1).astype(np.float32)


def load_extractor(checkpoint: Checkpoint) -> WhisperFeatureExtractor:
    """Return the feature extractor of a checkpoint. Raises ExportError."""
    if not (checkpoint.folder / CONFIG_FILE).is_file():
        raise ExportError(f"{checkpoint.role} {checkpoint.name} has no {CONFIG_FILE}")
    with quiet():
        try:
            return WhisperFeatureExtractor.from_pretrained(checkpoint.folder, local_files_only=True)
        except Exception as error:
            raise ExportError(
                f"{checkpoint.role} {checkpoint.name}: {CONFIG_FILE} cannot be read: "
                f"{first_line(error)}"
            ) from error
