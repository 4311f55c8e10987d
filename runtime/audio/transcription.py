"""Transcripts, and their formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Segment:
    """Segment of a transcript.

    Attributes:
        start: Begin in seconds.
        end: End in seconds.
        text: Text, which usually begins with a space.
        tokens: Tokens of the text, with timestamps if there are any.
    """

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Transcription:
    """Result of a transcription.

    Attributes:
        language: Code of the language, detected unless it was specified.
        task: "transcribe" or "translate".
        duration: Length of the audio in seconds.
        segments: Segments in order.
    """

    language: str
    task: str
    duration: float
    segments: list[Segment]

    @property
    def text(self) -> str:
        """Text of all segments."""
        return "".join(segment.text for segment in self.segments).strip()

    def as_dict(self) -> dict[str, Any]:
        """Return the transcript as JSON values, in OpenAI's format `verbose_json`."""
        segments = [{"id": i} | vars(segment) for i, segment in enumerate(self.segments)]
        return vars(self) | {"text": self.text, "segments": segments}


def subrip(segments: Sequence[Segment]) -> str:
    """Return segments as SubRip subtitles (SRT)."""
    cues = (
        f"{i}\n{_times(segment, ',')}\n{_cue(segment)}\n" for i, segment in enumerate(segments, 1)
    )
    return "\n".join(cues)


def webvtt(segments: Sequence[Segment]) -> str:
    """Return segments as WebVTT subtitles."""
    cues = (f"{_times(segment, '.')}\n{_cue(segment)}\n" for segment in segments)
    return "\n".join(["WEBVTT\n", *cues])


def _cue(segment: Segment) -> str:
    return segment.text.strip().replace("-->", "->")


def _times(segment: Segment, point: str) -> str:
    return f"{_time(segment.start, point)} --> {_time(segment.end, point)}"


def _time(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(1000 * seconds), 60_000)
    hours, minutes = divmod(minutes, 60)
    whole, fraction = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{whole:02}{point}{fraction:03}"
