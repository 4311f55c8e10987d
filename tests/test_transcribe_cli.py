"""`specedge transcribe`: files, formats and errors, with a table of transcripts."""

import io
import json
import wave
from typing import ClassVar

import numpy as np
import pytest
from click.testing import CliRunner

from specedge.bundle import store
from specedge.cli import cli
from specedge.runtime.audio import transcriber
from specedge.runtime.audio.transcription import Segment, Transcription


class TableTranscriber:
    calls: ClassVar[list] = []

    def __init__(self, pipeline):
        self.tokens = self

    def check(self, language, task):
        pass

    def detect_language(self, audio):
        return "de"

    def segments(self, audio, language, task, timestamps, **options):
        self.calls.append((len(audio), language, task, timestamps, options))
        yield from (Segment(0.0, 1.5, " Hello", [1]), Segment(1.5, 2.0, " world.", [2]))

    def transcribe(self, audio, language, **options):
        language = language or self.detect_language(audio)
        segments = list(self.segments(audio, language, **options))
        return Transcription(language, options["task"], 2.0, segments)


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(transcriber, "Transcriber", TableTranscriber)

    def invoke(*arguments, content=None):
        arguments = ["transcribe", *map(str, arguments), "--bundle", str(store.embedded_folder())]
        return CliRunner().invoke(cli, arguments, input=content)

    return invoke


def wav():
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(2)
        audio.setsampwidth(2)
        audio.setframerate(16_000)
        audio.writeframes(np.zeros(3200, "<i2").tobytes())
    return file.getvalue()


@pytest.fixture
def speech(tmp_path):
    path = tmp_path / "speech.wav"
    path.write_bytes(wav())
    return path


def test_segments_are_lines(run, speech):
    result = run(speech, "-k", "3", "--temperature", "0.5", "--seed", "1")
    assert (result.exit_code, result.stdout) == (0, "Hello\nworld.\n")
    options = {"temperature": 0.5, "seed": 1, "num_draft_tokens": 3, "drafter": "auto"}
    assert TableTranscriber.calls[-1] == (1600, "de", "transcribe", True, options)


@pytest.mark.parametrize(
    ("form", "begin"),
    [("srt", "1\n00:00:00,000 --> 00:00:01,500\nHello\n"), ("vtt", "WEBVTT\n\n00:00:00.000 -->")],
)
def test_subtitles(run, speech, form, begin):
    result = run(speech, "--format", form, "--language", "en", "--task", "translate")
    assert result.exit_code == 0
    assert result.stdout.startswith(begin)
    assert TableTranscriber.calls[-1][1:4] == ("en", "translate", True)


def test_json_and_standard_input(run):
    result = run("-", "--format", "json", "--no-timestamps", content=wav())
    found = json.loads(result.stdout)
    assert (found["text"], found["language"], len(found["segments"])) == ("Hello world.", "de", 2)
    assert TableTranscriber.calls[-1][3] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"ID3" + bytes(99), "has the format MP3"), (b"", "cannot be read as a WAV file")],
)
def test_other_files_are_refused(run, tmp_path, content, message):
    path = tmp_path / "song.mp3"
    path.write_bytes(content)
    result = run(path)
    assert result.exit_code == 1
    assert f"{path} {message}" in str(result.exception)
    result = run("-", content=content)
    assert f"standard input {message}" in str(result.exception)


def test_a_missing_file_is_a_usage_error(run, tmp_path):
    result = run(tmp_path / "none.wav")
    assert result.exit_code == 2
    assert "none.wav: No such file or directory" in result.stderr


def test_models_of_text_are_refused(speech):
    arguments = ["transcribe", str(speech), "--bundle", str(store.embedded_folder())]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 1
    assert "does not read speech; export a Whisper model" in str(result.exception)
