"""WAV files of 16-bit PCM, as mono samples at the rate of spectrograms."""

from __future__ import annotations

import math
import wave
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from specedge.bundle.manifest import SAMPLING_RATE
from specedge.errors import PromptError

Samples = NDArray[np.float32]

_MIN_RATE, _MAX_RATE = 4_000, 768_000
# Formats by the bytes at an offset.
_FORMATS = (
    (0, b"ID3", "MP3"),
    (0, b"\xff\xfb", "MP3"),
    (0, b"\xff\xf3", "MP3"),
    (0, b"OggS", "Ogg"),
    (0, b"fLaC", "FLAC"),
    (0, b"\x1aE\xdf\xa3", "WebM"),
    (0, b"FORM", "AIFF"),
    (4, b"ftyp", "MP4"),
)


def read_wav(file: BinaryIO, name: str) -> Samples:
    """Return the samples of a WAV file, from -1 to 1. [n]

    Channels are averaged, and other sampling rates converted.

    Args:
        file: Seekable file.
        name: Name of the file in errors.

    Raises:
        PromptError: The file is empty, damaged or of another format.
    """
    begin = file.read(16)
    file.seek(0)
    for offset, magic, format_ in _FORMATS:
        if begin[offset:].startswith(magic):
            raise _error(name, f"has the format {format_}")
    try:
        with wave.open(file) as audio:
            channels, width, rate, length = audio.getparams()[:4]
            if width != 2:
                raise _error(name, f"has {8 * width}-bit samples")
            data = audio.readframes(length)
    except (wave.Error, EOFError, RuntimeError) as error:  # the last one for sizes of chunks
        reason = str(error) or "it is truncated or damaged"
        raise _error(name, f"cannot be read as a WAV file of PCM ({reason})") from error
    data = data[: len(data) - len(data) % (2 * channels)]
    if not data:
        raise PromptError(f"{name} has no samples")
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise PromptError(
            f"{name} has a sampling rate of {rate} Hz; it must be between {_MIN_RATE} and "
            f"{_MAX_RATE}"
        )
    frames = np.frombuffer(data, "<i2").reshape(-1, channels)
    return resample(frames.mean(axis=1, dtype=np.float32) / np.float32(32768), rate)


def resample(samples: Samples, rate: int) -> Samples:
    """Return samples at `SAMPLING_RATE`, by polyphase filtering. [n] -> [m]"""
    if rate == SAMPLING_RATE:
        return samples
    from scipy.signal import resample_poly  # half a second, which most commands do without

    divisor = math.gcd(rate, SAMPLING_RATE)
    converted = resample_poly(samples, SAMPLING_RATE // divisor, rate // divisor)
    return np.asarray(converted, np.float32)


def _error(name: str, problem: str) -> PromptError:
    return PromptError(
        f"{name} {problem}; a WAV file of 16-bit PCM is required; convert it, for example by "
        "ffmpeg -i INPUT -c:a pcm_s16le OUTPUT.wav"
    )
