"""Shared parts of the tests of sample hosts: tools, libraries, changed bundles."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from specedge.attention_kernels import VARIABLE
from specedge.bundle.integrity import file_entry

TOOLS = "SPECEDGE_HOST_TOOLS"
KEEP_FLASH = (VARIABLE, "0")
REQUESTS = {
    "greedy": ("class Stack:\n    def push(", {}),
    "drawn": ("Ein Café, 漢字 und 😀:\n", {"temperature": 0.8, "top_k": 20, "seed": 11}),
    "with all filters": (
        "import os\n\n\ndef find(folder",
        {
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
            "seed": -3,
        },
    ),
    "after a prompt of several pieces": ("x = [1, 2]\n" * 50, {"temperature": 0.7, "seed": 2**40}),
}
SET_UP = "run tools/hosts/setup.sh DIR and set SPECEDGE_HOST_TOOLS to DIR"


def host_tools(*needed: str) -> Path:
    """The folder that tools/hosts/setup.sh filled; skips the test if it lacks one of `needed`."""
    if not os.environ.get(TOOLS):
        pytest.skip(f"no tools for sample hosts; {SET_UP}")
    tools = Path(os.environ[TOOLS]).resolve()
    for name in needed:
        if not (tools / name).exists():
            pytest.skip(f"{tools / name} is missing; {SET_UP}")
    return tools


def onnxruntime_library() -> Path:
    """ONNX Runtime's native library of the Python that runs the tests."""
    import onnxruntime

    found = sorted(Path(onnxruntime.__file__, "../capi").resolve().glob("libonnxruntime.so*"))
    if not found:
        pytest.skip("this onnxruntime package has no libonnxruntime.so; use one for Linux")
    return found[0]


def libraries() -> dict[str, str]:
    """The environment in which a host finds the native libraries that it loads by path."""
    tools = host_tools("lib/libortextensions.so")
    return os.environ | {
        "SPECEDGE_ONNXRUNTIME": str(onnxruntime_library()),
        "SPECEDGE_EXTENSIONS": str(tools / "lib/libortextensions.so"),
    }


def changed(bundle: Path, output: Path, change) -> Path:
    """A copy of a bundle in `output` whose manifest, as a dict, went through `change`."""
    shutil.copytree(bundle, output)
    manifest = json.loads((output / "bundle.json").read_text("utf-8"))
    change(manifest)
    (output / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    return output


def with_boundaries(bundle: Path, output: Path) -> Path:
    """A copy of a bundle whose runs are cut, as with wide heads, which changes no bit here.

    Without flash attention, which hosts disable unless `KEEP_FLASH` is in their environment, bits
    would change.
    """
    return changed(
        bundle, output, lambda manifest: manifest["hosts"].update(pass_boundaries=[3, 9, 10, 20])
    )


def options(settings):
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    return [part for pair in pairs for part in pair]


def generated(pipeline, prompt, num_new, settings, k=4):
    return pipeline.generate(prompt, num_new, num_draft_tokens=k, drafter="model", **settings)


def joined(tokens):
    return ",".join(map(str, tokens)) + "\n"


def check_refused(done, wanted):
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert wanted in line


def check_sources(run, bundle):
    """Check texts of several sources of an encoder-decoder; `run` runs a host with arguments."""
    import specedge

    with specedge.load(bundle) as pipeline:
        for source in ([9, 8, 7, 6, 1], [5], [11, 30, 12, 5] * 7 + [1]):
            for settings in ({}, {"temperature": 1.0, "seed": 5}):
                ids = ",".join(map(str, source))
                done = run(bundle, "--ids", ids, "-n", 33, "-k", 4, *options(settings))
                assert done.stdout == joined(generated(pipeline, source, 33, settings).tokens)
    check_refused(run(bundle, "--ids", "5," * 30 + "5"), "1 to 30")


def check_heads(run, bundle):
    """Check texts of a bundle with a draft head, of which the longest prompt is read in pieces."""
    import specedge

    with specedge.load(bundle) as pipeline:
        for prompt in ([5, 8, 13, 21, 34], [7], [*range(5, 39)] * 8):
            for k, settings in ((4, {}), (2, {"temperature": 1.0, "seed": 5})):
                ids = ",".join(map(str, prompt))
                done = run(bundle, "--ids", ids, "-n", 24, "-k", k, *options(settings))
                expected = generated(pipeline, prompt, 24, settings, k).tokens
                assert done.stdout == joined(expected), done.stderr


def write_wav(path, samples, rate=16_000, size=None):
    """Write 16-bit samples with a chunk before them, as programs do.

    `size` is that of the header; programs that write to pipes do not know it.
    """
    data = np.asarray(samples, "<i2").tobytes()
    size = len(data) if size is None else size
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    body = b"WAVE" + form + b"LIST\3\0\0\0abc\0" + struct.pack("<4sI", b"data", size) + data
    path.write_bytes(struct.pack("<4sI", b"RIFF", len(body)) + body)
    return path


def check_speech(run, bundle, folder):
    """Check texts of audio; `run` runs a host with arguments."""
    import specedge
    from specedge.runtime.audio.wav import read_wav
    from specedge.runtime.backend.sessions import Device
    from specedge.runtime.sampling.source import Source

    random = np.random.default_rng(0)
    with specedge.load(bundle) as pipeline:
        target = pipeline.bundle.target
        features = Device().open(bundle / target.graph("features", "onnx").file)
        for length in (target.encoder.num_samples, 5_001):
            samples = random.integers(-(2**15), 2**15, length)
            path = write_wav(folder / f"{length}.wav", samples)
            audio = np.zeros((1, target.encoder.num_samples), np.float32)
            with path.open("rb") as file:
                audio[0, :length] = read_wav(file, path.name)
            source = Source(features.run(None, {"audio": audio})[0][0])
            for prefix in ([3], [4, 20]):
                arguments = "-n", 33, "--decoder-prefix", ",".join(map(str, prefix))
                done = run(bundle, "--audio", path, *arguments)
                settings = {"decoder_prefix": prefix}
                expected = generated(pipeline, source, 33, settings).tokens
                assert done.stdout == joined(expected), done.stderr
        streamed = write_wav(folder / "streamed.wav", samples, size=2**32 - 1)
        assert run(bundle, "--audio", streamed, *arguments).stdout == done.stdout
    check_refused(run(bundle, "--audio", path), "speech needs a decoder prefix: tokens of language")
    other = write_wav(folder / "other.wav", [0, 1], rate=8_000)
    check_refused(run(bundle, "--audio", other), "1 channels of 16 bits at 8000 Hz")
    longer = write_wav(folder / "longer.wav", np.zeros(10_241))
    check_refused(run(bundle, "--audio", longer, *arguments), "the bundle takes 1 to 10240")
    other.write_bytes(other.read_bytes()[:30])
    check_refused(run(bundle, "--audio", other), "is damaged")
    check_refused(run(bundle, "--ids", "5,6"), "give audio instead of a prompt")


def with_another_transcript(bundle, output, key):
    """Copy a bundle and change a key of its second golden transcript."""

    def change(manifest):
        file = output / "golden.json"
        golden = json.loads(file.read_text("utf-8"))
        value = golden["transcripts"][1][key]
        other = value + "!" if isinstance(value, str) else [*value[:-1], value[-1] + 1]
        golden["transcripts"][1][key] = other
        file.write_text(json.dumps(golden), "utf-8")
        manifest["files"]["golden.json"] = vars(file_entry(file))

    return changed(bundle, output, change)


def damaged(bundle, output, name, damage):
    """Copy a bundle and damage one of its files."""
    shutil.copytree(bundle, output)
    damage(output / name)
    return output
