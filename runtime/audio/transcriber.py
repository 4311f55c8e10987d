"""Transcription of speech of any length, in windows of 30 s, as in openai-whisper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from specedge.bundle.manifest import FEATURES, SAMPLING_RATE
from specedge.errors import BundleError
from specedge.request import item_seed

from ..backend.model_session import ModelSession
from ..backend.sessions import Device
from ..requests.pipeline import Pipeline
from ..sampling.source import Source
from ..text.tokenizer import decode
from .speech_tokens import SECONDS_PER_TOKEN, SpeechTask, SpeechTokens
from .transcription import Segment, Transcription
from .wav import Samples

_LANGUAGE_BIAS = 100.0  # more than the difference of any two logits


class Transcriber:
    """Transcription by a pipeline of a Whisper model.

    Windows are decoded separately: the text of one is not a prompt of the next. With timestamps, a
    window begins where the last complete segment ends.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """Raise BundleError if the model does not read speech."""
        self._pipeline = pipeline
        target = pipeline.bundle.target
        encoder = target.encoder
        if encoder is None or encoder.source_shape is None or not target.has_graph(FEATURES):
            raise BundleError(
                f"{target.source.id} does not read speech; export a Whisper model, and select its "
                "bundle"
            )
        self._shape, self._num_samples = encoder.source_shape, encoder.num_samples
        self.tokens = SpeechTokens.of(pipeline.bundle, pipeline.tokenizer)

    def transcribe(
        self,
        audio: Samples,
        language: str | None = None,
        task: str = SpeechTask.TRANSCRIBE.value,
        timestamps: bool = True,
        **options: Any,
    ) -> Transcription:
        """Return the transcript of audio.

        Args:
            audio: Samples from -1 to 1 at 16 kHz, as `read_wav` returns them. [n]
            language: Code of the language, such as "en"; by default it is detected.
            task: "transcribe", or "translate" to English.
            timestamps: False to decode without timestamps; segments then are windows of 30 s.
            options: `is_cancelled`, called before each round, which ends the transcript if it
                returns True; and options of `Pipeline.generate`, such as `temperature` and
                `num_draft_tokens`. Window i is sampled with `seed` + i.

        Raises:
            OptionError: The model does not have the language or task, or an option is invalid.
        """
        self.tokens.check(language, task)
        language = language or self.detect_language(audio)
        segments = list(self.segments(audio, language, task, timestamps, **options))
        return Transcription(language, task, len(audio) / SAMPLING_RATE, segments)

    def segments(
        self,
        audio: Samples,
        language: str,
        task: str = SpeechTask.TRANSCRIBE.value,
        timestamps: bool = True,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> Iterator[Segment]:
        """Yield the segments of audio in a language as they are decoded, as `transcribe`."""
        self.tokens.check(language, task)
        prefix = self.tokens.prefix(language, task, timestamps)
        rules = self.tokens.rules() if timestamps else None
        limit = {"max_new_tokens": self._pipeline.bundle.context_length}
        start, index, seed = 0, 0, options.pop("seed", None)
        while start < len(audio) and not is_cancelled():
            window = audio[start : start + self._num_samples]
            stream = self._pipeline.stream(
                self.source(window),
                decoder_prefix=prefix,
                timestamps=rules,
                seed=None if seed is None else item_seed(seed, index),
                **limit | options,
            )
            for _ in stream:
                if is_cancelled():
                    stream.close()
                    return
            text = [token for token in stream.generation.tokens if token != self.tokens.end]
            segments, num_samples = self.split(text, len(window))
            offset = start / SAMPLING_RATE
            for first, last, tokens in segments:
                if piece := self._text(tokens):
                    yield Segment(round(offset + first, 3), round(offset + last, 3), piece, tokens)
            start, index = start + num_samples, index + 1

    def split(
        self, tokens: Sequence[int], num_samples: int
    ) -> tuple[list[tuple[float, float, list[int]]], int]:
        """Split the tokens of a window at pairs of timestamps.

        Args:
            tokens: Tokens of the window, without the end token.
            num_samples: Samples of the window.

        Returns:
            Begin and end in seconds and the tokens of each segment, and the number of samples after
            which the next window begins: that of the last pair, unless the text ends with a single
            timestamp or has no pair.
        """
        first = self.tokens.no_timestamps + 1
        is_stamp = [token >= first for token in tokens]
        seconds = num_samples / SAMPLING_RATE
        bounds = [i for i in range(1, len(tokens)) if is_stamp[i - 1] and is_stamp[i]]
        ends_with_one = is_stamp[-2:] == [False, True]
        if not bounds:
            stamps = [token - first for token in tokens if token > first]
            end = min(seconds, stamps[-1] * SECONDS_PER_TOKEN) if stamps else seconds
            return [(0.0, end, list(tokens))], num_samples
        segments, begin = [], 0
        for bound in [*bounds, len(tokens)] if ends_with_one else bounds:
            part = list(tokens[begin:bound])
            times = [(part[i] - first) * SECONDS_PER_TOKEN for i in (0, -1)]
            segments.append((times[0], times[1], part))
            begin = bound
        if ends_with_one:
            return segments, num_samples
        return segments, round(segments[-1][1] * SAMPLING_RATE) or num_samples

    def detect_language(self, audio: Samples) -> str:
        """Return the code of the most likely language of the first 30 s of audio."""
        languages = self.tokens.languages
        if not languages:
            return "en"
        generation = self._pipeline.generate(
            self.source(audio[: self._num_samples]),
            1,
            decoder_prefix=[],
            num_draft_tokens=0,
            logit_bias=dict.fromkeys(languages.values(), _LANGUAGE_BIAS),
        )
        codes = {token: code for code, token in languages.items()}
        return codes[generation.tokens[0]]

    def source(self, audio: Samples) -> Source:
        """Return the spectrogram of at most 30 s of audio. [n]"""
        padded = np.zeros((1, self._num_samples), np.float32)
        padded[0, : len(audio)] = audio
        source = np.zeros((1, *self._shape), np.float32)
        self._features.map(padded, {"source": source})
        return Source(source[0])

    @cached_property
    def _features(self) -> ModelSession:
        """Session of the graph of spectrograms, on the CPU."""
        bundle = self._pipeline.bundle
        ops = next(graph.ops for graph in bundle.target.graphs if graph.name == FEATURES)
        return ModelSession(bundle, bundle.target, Device(), ops, FEATURES)

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without timestamps and other control tokens."""
        words = [token for token in tokens if token < self.tokens.end]
        text = decode(self._pipeline.tokenizer, words)
        return text if text.strip() else ""
