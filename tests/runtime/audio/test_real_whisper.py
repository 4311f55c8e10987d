"""Transcription by Whisper tiny.en and base equals transformers', for any K."""

import numpy as np
import pytest
import torch

import real_weights
import specedge
from specedge.runtime.audio.transcriber import Transcriber
from specedge.runtime.audio.wav import read_wav

pytestmark = pytest.mark.slow(exhaustive=True)

TEXTS = {
    "en": "The quick brown fox jumps over the lazy dog. Speculative decoding makes language models "
    "faster, without changing their output.",
    "fr": "Bonjour, je m'appelle Marie et j'habite à Paris depuis dix ans. J'aime la musique.",
}
LONG = (
    "In seventeen ninety one, the committee met again. They decided to build a bridge across the "
    "river. It took eleven years to complete, and many people doubted that it would ever be "
    "finished. On the first day of May, the mayor opened the bridge, and a large crowd walked "
    "across it, singing and laughing. Later that evening, a storm arrived from the north. The wind "
    "was very strong, but the bridge did not move. The next morning, the farmers came to the "
    "market with apples, bread and cheese."
)


class Whisper:
    """A checkpoint's bundle, and transformers' model."""

    def __init__(self, name):
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

        import whisper_weights

        try:
            folder = whisper_weights.checkpoint(name)
        except real_weights.UnavailableWeightsError as error:
            pytest.skip(str(error))
        self.pipeline = specedge.load(real_weights.bundle_of(folder, "fp32", name=name))
        self.transcriber = Transcriber(self.pipeline)
        self.model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def expected(self, audio, timestamps, **options):
        """New tokens of transformers for 30 s of audio, without the end token."""
        features = self.extractor(audio, sampling_rate=16_000, return_tensors="pt")
        with torch.inference_mode():
            tokens = self.model.generate(
                features["input_features"], return_timestamps=timestamps, do_sample=False, **options
            )[0].tolist()
        end, speech = self.transcriber.tokens.end, self.transcriber.tokens
        first = next((i for i, t in enumerate(tokens) if t < end or t > speech.no_timestamps), 0)
        return [token for token in tokens[first:] if token != end]


@pytest.fixture(scope="module", params=["whisper-tiny.en", "whisper-base"])
def whisper(request):
    return Whisper(request.param)


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """Audio of a text in a language."""
    import speech

    folder = tmp_path_factory.mktemp("speech")

    def read(text, language):
        path = folder / f"{language}-{len(text)}.wav"
        try:
            speech.say(text, path, language)
        except real_weights.UnavailableWeightsError as error:
            pytest.skip(str(error))
        with path.open("rb") as file:
            return read_wav(file, path.name)

    return read


@pytest.mark.parametrize("timestamps", [False, True])
def test_text_is_transformers_for_any_k(whisper, speech, timestamps):
    languages = ["en"] if not whisper.transcriber.tokens.languages else ["en", "fr"]
    for language in languages:
        audio = speech(TEXTS[language], language)
        options = {} if len(languages) == 1 else {"language": language, "task": "transcribe"}
        expected = whisper.expected(audio, timestamps, **options)
        for k in (0, 1, 4, 8):
            found = whisper.transcriber.transcribe(
                audio, language, timestamps=timestamps, num_draft_tokens=k, drafter="suffix"
            )
            assert [token for s in found.segments for token in s.tokens] == expected


def test_the_language_is_detected(whisper, speech):
    detected = whisper.transcriber.detect_language(speech(TEXTS["fr"], "fr"))
    assert detected == ("fr" if whisper.transcriber.tokens.languages else "en")


def test_long_speech_has_a_continuous_transcript(whisper, speech):
    audio = speech(LONG, "en")
    assert len(audio) > 31 * 16_000
    found = whisper.transcriber.transcribe(audio, "en")
    starts, ends = ([getattr(s, name) for s in found.segments] for name in ("start", "end"))
    assert np.all(np.diff(starts) > 0)
    assert max(ends) == pytest.approx(len(audio) / 16_000, abs=2)
    assert found.text.startswith("In 1791, the committee met again")
    assert found.text.endswith("came to the market with apples, bread and cheese.")
