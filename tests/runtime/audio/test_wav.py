"""WAV files: channels, sampling rates, and formats that are refused by name."""

import io
import struct
import wave

import numpy as np
import pytest

from specedge.errors import PromptError
from specedge.runtime.audio.wav import read_wav


def wav_of(samples, rate=16_000, width=2):
    """A file of samples [n, channels] from -1 to 1."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(samples.shape[1])
        audio.setsampwidth(width)
        audio.setframerate(rate)
        integers = np.round(samples * 32767).astype("<i2")
        audio.writeframes(integers.tobytes() if width == 2 else bytes(samples.size * width))
    return file.getvalue()


def read(content):
    return read_wav(io.BytesIO(content), "speech.wav")


def tone(frequency, rate, seconds=0.5):
    return 0.5 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


def test_samples_are_those_of_the_file():
    samples = np.array([[0.0], [0.5], [-1.0], [1.0]])
    audio = read(wav_of(samples))
    assert audio.dtype == np.float32
    np.testing.assert_allclose(audio, samples[:, 0], atol=1e-4)


@pytest.mark.parametrize("channels", [1, 2, 6])
def test_channels_are_averaged(channels):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (100, channels))
    np.testing.assert_allclose(read(wav_of(samples)), samples.mean(axis=1), atol=1e-4)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_other_rates_are_resampled(rate):
    audio = read(wav_of(tone(440, rate)[:, None], rate))
    expected = tone(440, 16_000)
    assert len(audio) == len(expected)
    inside = slice(800, -800)  # the filter sees silence beyond the ends
    np.testing.assert_allclose(audio[inside], expected[inside], atol=2e-3)


def test_frequencies_above_half_the_rate_are_removed():
    audio = read(wav_of(tone(12_000, 48_000)[:, None], 48_000))
    assert np.abs(audio[800:-800]).max() < 1e-2


@pytest.mark.parametrize(
    ("begin", "name"),
    [
        (b"ID3\4", "MP3"), (b"\xff\xfb\x90", "MP3"), (b"OggS\0", "Ogg"), (b"fLaC\0", "FLAC"),
        (b"\x1aE\xdf\xa3", "WebM"), (b"\0\0\0\x20ftypM4A ", "MP4"), (b"FORM\0\0\0\0AIFF", "AIFF"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(begin, name):
    with pytest.raises(PromptError, match=rf"speech\.wav has the format {name}; .*16-bit PCM"):
        read(begin + bytes(100))


@pytest.mark.parametrize("width", [1, 3, 4])
def test_other_sample_sizes_are_refused_by_name(width):
    with pytest.raises(PromptError, match=f"has {8 * width}-bit samples; .*16-bit PCM"):
        read(wav_of(np.zeros((8, 1)), width=width))


def test_float_samples_are_refused():
    content = bytearray(wav_of(np.zeros((8, 1))))
    content[20:22] = struct.pack("<H", 3)
    with pytest.raises(PromptError, match=r"cannot be read as a WAV file .*unknown format"):
        read(bytes(content))


@pytest.mark.parametrize("content", [b"", b"RIFF", b"RIFF\x24\0\0\0WAVE", b"hello world" * 9])
def test_damaged_files_are_refused(content):
    with pytest.raises(PromptError, match="cannot be read as a WAV file"):
        read(content)


def test_a_truncated_file_has_the_samples_that_are_left():
    content = wav_of(np.full((100, 2), 0.25))
    assert len(read(content[:-7])) == 98
    with pytest.raises(PromptError, match="has no samples"):
        read(content[:44])


@pytest.mark.parametrize("rate", [1, 900_000])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(PromptError, match=f"sampling rate of {rate} Hz"):
        read(wav_of(np.zeros((8, 1)), rate))
