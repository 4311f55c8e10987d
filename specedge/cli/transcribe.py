"""Command `specedge transcribe`."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import click

from specedge.cli import options
from specedge.cli.terminal import sanitize

MAX_AUDIO = 2**31  # bytes of a file
FORMATS = ("text", "srt", "vtt", "json")


@click.command()
@click.argument("file")
@options.bundle
@click.option("--language", metavar="CODE", help="Language, such as en.  [default: detected]")
@click.option(
    "--task",
    type=click.Choice(("transcribe", "translate")),
    default="transcribe",
    show_default=True,
    help="Write the text in the language of the speech, or in English.",
)
@click.option(
    "--no-timestamps",
    is_flag=True,
    help="Decode without timestamps; segments are 30 seconds long.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="Output format: a line for each segment, subtitles (srt, vtt), or json.",
)
@options.request_option("temperature")
@options.request_option("seed")
@options.request_option("num_draft_tokens")
@options.request_option("drafter")
@options.execution
def transcribe(
    file: str, language: str | None, task: str, no_timestamps: bool, form: str, **request: Any
) -> None:
    """Transcribe the speech of FILE, a WAV file of 16-bit PCM.

    `-` reads the file from standard input. Whisper models and pairs with Distil-Whisper are
    supported.
    """
    from specedge.runtime.audio import transcription
    from specedge.runtime.audio.transcriber import Transcriber
    from specedge.runtime.audio.wav import read_wav

    audio = read_wav(io.BytesIO(_read(file)), "standard input" if file == "-" else file)
    transcriber = Transcriber(options.load_pipeline(**options.pop_model_options(request)))
    arguments: dict[str, Any] = {"task": task, "timestamps": not no_timestamps}
    with options.usage_errors():
        if form == "text":
            transcriber.tokens.check(language, task)
            language = language or transcriber.detect_language(audio)
            for segment in transcriber.segments(audio, language, **arguments, **request):
                click.echo(sanitize(segment.text.strip()))
                sys.stdout.flush()
            return
        result = transcriber.transcribe(audio, language, **arguments, **request)
    if form == "json":
        text = json.dumps(result.as_dict(), ensure_ascii=False, indent=1) + "\n"
    else:
        text = {"srt": transcription.subrip, "vtt": transcription.webvtt}[form](result.segments)
    click.echo(text, nl=False)


def _read(file: str) -> bytes:
    """Return the content of a file, or of standard input for `-`."""
    if file == "-" and sys.stdin is None:
        raise click.UsageError("standard input is closed; specify a file")
    try:
        with sys.stdin.buffer if file == "-" else open(file, "rb") as stream:
            content = stream.read(MAX_AUDIO + 1)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file}: {getattr(error, 'strerror', error)}") from error
    if len(content) > MAX_AUDIO:
        raise click.UsageError(f"{file} exceeds the limit of {MAX_AUDIO // 2**30} GiB")
    return content
