"""/v1/audio/transcriptions and translations: fields, files, formats and errors."""

import http.client
import io
import json
import threading
import wave

import numpy as np
import openai
import pytest

from served import MODEL, serving
from specedge.bundle import Bundle
from specedge.errors import OptionError
from specedge.runtime.audio.transcription import Segment, Transcription
from specedge.serve import app

SEGMENTS = [Segment(0.0, 1.5, " Hello", [1, 2]), Segment(1.5, 2.0, " world.", [3])]


class TableTranscriber:
    """Transcriber whose transcripts state how it was called."""

    calls, release, waits = [], threading.Event(), threading.Event()

    def __init__(self, pipeline):
        self.release.set()

    def transcribe(self, audio, language, task, timestamps, *, is_cancelled, **options):
        self.calls.append((len(audio), language, task, timestamps, options))
        if language == "xx":
            raise OptionError("language must be a code such as en, got 'xx'", "language")
        if language == "waits":
            self.release.clear()
            self.waits.set()
            while not is_cancelled():
                self.release.wait(0.01)
            self.release.set()
        return Transcription(language or "de", task, 2.0, SEGMENTS)


@pytest.fixture(scope="module")
def port(pipeline):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bundle, "reads_speech", True)
        patch.setattr(app, "Transcriber", TableTranscriber)
        with serving(pipeline, timeout=3) as found:
            yield found


@pytest.fixture
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)


def wav(seconds=0.1):
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(16_000)
        audio.writeframes(np.zeros(round(16_000 * seconds), "<i2").tobytes())
    return file.getvalue()


def post(port, body, content_type="multipart/form-data; boundary=X", path="transcriptions"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", f"/v1/audio/{path}", body, {"Content-Type": content_type})
    response = connection.getresponse()
    text = response.read().decode()
    return response, json.loads(text) if text.startswith("{") else text


def form(file=None, name="a.wav", **fields):
    """A multipart body; a field's name ends with [] if its value is a list."""
    parts = []
    for key, value in fields.items():
        values = value if isinstance(value, list) else [value]
        suffix = "[]" if isinstance(value, list) else ""
        parts += [f'Content-Disposition: form-data; name="{key}{suffix}"\r\n\r\n{v}'.encode()
                  for v in values]  # fmt: skip
    if file is not None:
        head = f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        parts.append(head.encode() + file)
    return b"".join(b"--X\r\n" + part + b"\r\n" for part in parts) + b"--X--\r\n"


def test_openais_client_gets_transcripts(client):
    create = client.audio.transcriptions.create
    file = ("speech.wav", wav())
    assert create(model=MODEL, file=file).text == "Hello world."
    verbose = create(
        model=MODEL, file=file, language="en", response_format="verbose_json", temperature=0.5,
        timestamp_granularities=["segment"],
    )  # fmt: skip
    assert (verbose.language, verbose.duration, verbose.text) == ("en", 2.0, "Hello world.")
    assert [(s.start, s.end, s.text) for s in verbose.segments] == [
        (0.0, 1.5, " Hello"), (1.5, 2.0, " world."),
    ]  # fmt: skip
    assert TableTranscriber.calls[-2:] == [
        (1600, None, "transcribe", False, {}),
        (1600, "en", "transcribe", True, {"temperature": 0.5}),
    ]  # fmt: skip
    translation = client.audio.translations.create(model=MODEL, file=file)
    assert translation.text == "Hello world."
    assert TableTranscriber.calls[-1][2] == "translate"


@pytest.mark.parametrize(
    ("response_format", "begin"),
    [("text", "Hello world.\n"), ("srt", "1\n00:00:00,000 --> 00:00:01,500\nHello\n"),
     ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello\n")],
)  # fmt: skip
def test_other_formats_are_plain_text(port, response_format, begin):
    response, body = post(port, form(wav(), response_format=response_format))
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert body.startswith(begin)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": "diarized_json"}, "response_format", "must be one of json, text"),
        ({"temperature": "warm"}, "temperature", "temperature must be a number"),
        ({"temperature": "-1"}, "temperature", "temperature must be at least 0"),
        ({"temperature": "nan"}, "temperature", "temperature must be"),
        ({"seed": "1.5"}, "seed", "seed must be a whole number"),
        ({"prompt": "Names: Ann"}, "prompt", "prompt is not supported"),
        ({"stream": "true"}, "stream", "stream is not supported"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities[]", "not supported"),
        ({"language": "xx"}, "language", "must be a code"),
    ],
)
def test_invalid_fields_are_named(port, fields, param, message):
    response, body = post(port, form(wav(), **fields))
    assert response.status == 400
    assert body["error"]["param"] == param
    assert message in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (form(model="m"), "file", "file is required"),
        (form(wav()).replace(b'; filename="a.wav"', b""), "file", "file is required"),
        (form(b"ID3" + bytes(99), "song.mp3"), "file", "song.mp3 has the format MP3"),
        (form(wav()[:50].replace(b"data", b"dato")), "file", "cannot be read as a WAV file"),
        (b"--Y\r\n\r\n", None, "invalid body"),
        (b"", "file", "file is required"),
    ],
)
def test_invalid_files_are_refused(port, body, param, message):
    response, found = post(port, body)
    assert response.status == 400
    assert found["error"]["param"] == param
    assert message in found["error"]["message"]


def test_other_content_types_are_refused(port):
    response, body = post(port, b"{}", "application/json")
    assert (response.status, body["error"]["code"]) == (415, "invalid_content_type")
    response, body = post(port, form(wav()), "multipart/form-data")
    assert response.status == 400
    assert "boundary" in body["error"]["message"]


def test_the_model_card_names_the_capability(client):
    (card,) = client.models.list()
    assert card.capabilities == ["transcription"]


def test_unknown_fields_are_ignored_and_listed(port):
    response, body = post(port, form(wav(), surprise="1", model=MODEL))
    assert (response.status, body["text"]) == (200, "Hello world.")
    assert response.headers["x-specedge-ignored"] == "surprise"


def test_a_request_that_takes_too_long_ends_with_its_work(port):
    response, body = post(port, form(wav(), language="waits"))
    assert (response.status, body["error"]["code"]) == (504, "timeout")
    assert TableTranscriber.release.wait(5)
    assert post(port, form(wav()))[0].status == 200


def test_work_ends_when_the_client_disconnects(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"Content-Type": "multipart/form-data; boundary=X"}
    TableTranscriber.waits.clear()
    connection.request("POST", "/v1/audio/transcriptions", form(wav(), language="waits"), headers)
    assert TableTranscriber.waits.wait(20)
    connection.close()
    assert TableTranscriber.release.wait(2)  # before the timeout


def test_models_of_text_do_not_transcribe(pipeline, monkeypatch):
    monkeypatch.setattr(Bundle, "reads_speech", False)
    with serving(pipeline) as port:
        response, body = post(port, form(wav()))
        assert response.status == 400
        assert (
            f"{pipeline.bundle.target.source.id} does not read speech" in body["error"]["message"]
        )
