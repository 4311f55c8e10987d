"""Formats of transcripts."""

import json

from specedge.runtime.audio.transcription import Segment, Transcription, subrip, webvtt

SEGMENTS = [Segment(0.0, 3.32, " A first line.", [1]), Segment(3661.5, 3662.0, " b --> c", [2, 3])]


def test_subrip_has_numbered_cues():
    assert subrip(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:03,320\nA first line.\n\n"
        "2\n01:01:01,500 --> 01:01:02,000\nb -> c\n"
    )


def test_webvtt_has_a_header():
    assert webvtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:03.320\nA first line.\n\n"
        "01:01:01.500 --> 01:01:02.000\nb -> c\n"
    )
    assert webvtt([]).startswith("WEBVTT\n")
    assert subrip([]) == ""


def test_json_is_that_of_openai():
    transcript = Transcription("en", "transcribe", 5.0, SEGMENTS)
    value = json.loads(json.dumps(transcript.as_dict()))
    assert value["text"] == "A first line. b --> c"
    assert (value["language"], value["duration"], value["task"]) == ("en", 5.0, "transcribe")
    assert value["segments"][1] == {
        "id": 1, "start": 3661.5, "end": 3662.0, "text": " b --> c", "tokens": [2, 3],
    }  # fmt: skip
