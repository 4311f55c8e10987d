"""Log-mel spectrograms of Whisper (Radford et al. 2022) as a graph of standard operators.

The Fourier transform of a frame is a product with windowed cosines and sines, so all frames are one
convolution whose stride is the hop length.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specedge.bundle.manifest import FEATURES, HOP_LENGTH

from .nodes import FLOAT, GraphBuilder

_MIN_ENERGY = 1e-10
_RANGE = 8.0  # decades below the largest energy


def build_log_mel(filters: NDArray[np.float64], window: int, num_samples: int) -> ir.Model:
    """Return a graph that maps `audio` [1, num_samples] to `source`, a spectrogram [1, mels, N].

    N is the number of samples divided by the hop length. Frame i begins half a window before sample
    i times the hop length; both ends of the audio are reflected. The last frame of the whole audio,
    which Whisper drops, is not computed.

    Args:
        filters: Mel filters. [window / 2 + 1, mels]
        window: Samples of a frame, which a periodic Hann window weights.
        num_samples: Samples of the audio.
    """
    frequencies, times = np.arange(window // 2 + 1), np.arange(window)
    angles = 2 * np.pi * np.outer(frequencies, times) / window
    waves = np.concatenate([np.cos(angles), np.sin(angles)]) * np.hanning(window + 1)[:-1]
    mels = np.concatenate([filters, filters]).T.astype(np.float32)  # both parts of the energy
    nodes = GraphBuilder(FEATURES)
    audio = nodes.input("audio", FLOAT, [1, num_samples])
    pads = [0, 0, window // 2, 0, 0, window // 2 - HOP_LENGTH]
    padded = nodes("Pad", nodes("Unsqueeze", audio, [1]), pads, mode="reflect")
    parts = nodes("Conv", padded, waves[:, None].astype(np.float32), strides=[HOP_LENGTH])
    energies = nodes("Max", nodes("MatMul", mels, nodes("Mul", parts, parts)), _MIN_ENERGY)
    decades = nodes("Div", nodes("Log", energies), float(np.log(10)))
    smallest = nodes("Sub", nodes("ReduceMax", decades, [1, 2]), _RANGE)
    source = nodes("Div", nodes("Add", nodes("Max", decades, smallest), 4.0), 4.0)
    nodes.output("source", source, FLOAT, [1, len(mels), num_samples // HOP_LENGTH])
    return ir.Model(nodes.graph, ir_version=10)
