"""Requests of /v1/audio/transcriptions and /v1/audio/translations, and their responses."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_timeout import timeout
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from specedge.errors import OptionError, PromptError
from specedge.request import build_request
from specedge.runtime.audio.transcriber import Transcriber
from specedge.runtime.audio.transcription import Transcription, subrip, webvtt
from specedge.runtime.audio.wav import read_wav

from .errors import ApiError, logged_error, prompt_error, timeout_error
from .fields import FieldReader, IgnoredFields, excerpt, field_error
from .job_queue import JobQueue
from .request_handler import IGNORED_HEADER, while_connected

MAX_AUDIO = 25 * 2**20  # bytes of a body, as in OpenAI's API
MULTIPART = "multipart/form-data"
GRANULARITIES = "timestamp_granularities[]"
FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_SUBTITLES = ("srt", "verbose_json", "vtt")
_MAX_FIELDS = 64
# Fields that would change the response, and the values that are accepted.
UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt": ("",),
    "stream": ("false", "False"),
    "chunking_strategy": ("auto",),
    GRANULARITIES: (["segment"],),
    "include[]": ([],),
}


@dataclass(frozen=True)
class TranscriptionRequest:
    """Parsed request.

    Attributes:
        content: Content of the audio file.
        file_name: Name of the file, for errors.
        model: Name of the model, or None.
        language: Language, None to detect it.
        task: Task.
        response_format: One of `FORMATS`.
        options: Sampling options.
        ignored: Names of unknown fields.
    """

    content: bytes
    file_name: str
    model: str | None
    language: str | None
    task: str
    response_format: str
    options: Mapping[str, Any]
    ignored: tuple[str, ...]


async def parse_transcription(
    body: bytearray, content_type: str, task: str, strict: bool
) -> TranscriptionRequest:
    """Parse a multipart body.

    Args:
        body: The body.
        content_type: Its type, with the boundary of its parts.
        task: "transcribe" or "translate".
        strict: True to reject unknown fields.

    Raises:
        ApiError: The body or a field is invalid.
    """

    async def chunks() -> AsyncGenerator[bytes]:
        yield bytes(body)

    headers = Headers({"content-type": content_type})
    parser = MultiPartParser(headers, chunks(), max_files=1, max_fields=_MAX_FIELDS)
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        reason = error.message if isinstance(error, MultiPartException) else "it has no boundary"
        raise ApiError(f"invalid body: {reason}", code="invalid_multipart") from error
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError("file is required, as a part with a file name", "file")
        content, name = await file.read(), (file.filename or "file")[:100]
        values: dict[str, Any] = {}
        for field, value in form.multi_items():
            if isinstance(value, UploadFile) and field != "file":
                raise ApiError(f"{field[:100]} must not be a file", field[:100])
            if field.endswith("[]"):
                values.setdefault(field, []).append(value)
            elif field != "file":
                values[field] = value
    finally:
        await form.close()
    ignored = None if strict else IgnoredFields()
    fields = FieldReader(values, ignored=ignored)
    model, language = fields.take("model"), fields.take("language")
    response_format = fields.take("response_format") or "json"
    if response_format not in FORMATS:
        raise ApiError(
            f"response_format must be one of {', '.join(FORMATS)}, got {excerpt(response_format)}",
            "response_format",
        )
    options = {
        name: _number(fields, name, type_)
        for name, type_ in (("temperature", float), ("seed", int))
        if fields.peek(name) not in (None, "")
    }
    fields.skip("temperature", "seed")
    fields.reject_unsupported(UNSUPPORTED_FIELDS)
    fields.finish()
    try:
        build_request(**options)
    except OptionError as error:
        raise field_error(error, {}) from error
    return TranscriptionRequest(
        content,
        name,
        model,
        language or None,
        task,
        response_format,
        options,
        tuple(ignored.names) if ignored else (),
    )


def _number(fields: FieldReader, name: str, type_: type) -> Any:
    value = fields.take(name)
    try:
        return type_(value)
    except ValueError as error:
        kind = "a whole number" if type_ is int else "a number"
        raise ApiError(f"{name} must be {kind}, got {excerpt(value)}", name) from error


class TranscriptionHandler:
    """Execution of a request, from admission to its response or the client's disconnect."""

    def __init__(
        self,
        transcriber: Transcriber,
        jobs: JobQueue,
        request: TranscriptionRequest,
        seconds: float,
    ) -> None:
        self._transcriber, self._jobs = transcriber, jobs
        self._request, self._seconds = request, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._jobs.admitted(1):
            response = await while_connected(receive, self._respond())
            if response is not None:
                await response(scope, receive, send)

    async def _respond(self) -> Response:
        stop = threading.Event()
        try:
            async with timeout(self._seconds):
                transcript = await self._jobs.run_blocking(partial(self._run, stop), stop.set)
        except asyncio.TimeoutError as error:
            raise timeout_error(self._seconds) from error
        return _response(transcript, self._request)

    def _run(self, stop: threading.Event) -> Transcription:
        """Transcribe in a thread; `stop` ends it after the current window."""
        request = self._request
        try:
            audio = read_wav(io.BytesIO(request.content), request.file_name)
            return self._transcriber.transcribe(
                audio,
                request.language,
                request.task,
                request.response_format in _SUBTITLES,
                is_cancelled=stop.is_set,
                **request.options,
            )
        except PromptError as error:
            raise prompt_error(error, "file") from error
        except OptionError as error:
            raise field_error(error, {"timestamps": "response_format"}) from error
        except Exception as error:
            raise logged_error(error) from error


def _response(transcript: Transcription, request: TranscriptionRequest) -> Response:
    headers = {IGNORED_HEADER: ", ".join(request.ignored)} if request.ignored else {}
    form = request.response_format
    if form in ("json", "verbose_json"):
        body = transcript.as_dict() if form == "verbose_json" else {"text": transcript.text}
        return JSONResponse(body, headers=headers)
    writers = {"srt": subrip, "vtt": webvtt}
    text = writers[form](transcript.segments) if form in writers else f"{transcript.text}\n"
    return PlainTextResponse(text, headers=headers)
