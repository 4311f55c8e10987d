"""Speech of espeak-ng, for tests and measurements.

    python tools/speech.py TEXT OUTPUT.wav [VOICE]

The library is downloaded from the Python package index to the user's cache.
"""

from __future__ import annotations

import ctypes
import sys
import wave
import zipfile
from pathlib import Path

from filelock import FileLock

from real_weights import CACHE, Weights, fetch_packages

PACKAGE = Weights("espeak-ng", ("espeakng-loader==0.2.4",), "")
_SYNCHRONOUS, _PHRASES = 2, 0  # AUDIO_OUTPUT_SYNCHRONOUS and espeakINITIALIZE_PHONEME_EVENTS off
_UTF8 = 1
_RATE = 1  # espeakRATE
_WORDS_PER_MINUTE = 140


def say(text: str, path: Path, voice: str = "en") -> Path:
    """Write a text as speech to a WAV file of 16-bit PCM at 22,050 Hz.

    Raises:
        UnavailableWeightsError: The package was not downloaded.
    """
    folder = _library()
    library = ctypes.CDLL(str(next(folder.glob("libespeak-ng*"))))
    rate = library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), _PHRASES)
    samples = bytearray()

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def receive(data: ctypes._Pointer[ctypes.c_short], count: int, _: object) -> int:
        if data and count > 0:
            samples.extend(ctypes.string_at(data, 2 * count))
        return 0

    library.espeak_SetSynthCallback(receive)
    if library.espeak_SetVoiceByName(voice.encode()):
        raise ValueError(f"espeak-ng has no voice {voice}")
    library.espeak_SetParameter(_RATE, _WORDS_PER_MINUTE, 0)
    content = text.encode()
    library.espeak_Synth(content, len(content) + 1, 0, 1, 0, _UTF8, None, None)
    library.espeak_Synchronize()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(bytes(samples))
    return path


def _library() -> Path:
    """Return the folder of the library and its voices, downloaded once."""
    folder = CACHE / PACKAGE.name
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{PACKAGE.name}.lock"):
        if not folder.exists():
            wheels = folder.with_name(f"{PACKAGE.name}-wheel")
            wheels.mkdir(exist_ok=True)
            fetch_packages(PACKAGE, wheels)
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as archive:
                archive.extractall(folder)
    return folder / "espeakng_loader"


if __name__ == "__main__":
    say(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
