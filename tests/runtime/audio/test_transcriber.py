"""Windows, segments and languages, with a pipeline whose texts are a table."""

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from specedge.bundle.manifest import EncoderEntry
from specedge.errors import BundleError, OptionError
from specedge.runtime.audio.transcriber import Transcriber

WORDS = [f" w{i}" for i in range(8)]
CONTROLS = [
    "endoftext", "startoftranscript", "en", "fr", "translate", "transcribe", "startofprev",
    "notimestamps",
]  # fmt: skip
END, START, ENGLISH, FRENCH, TRANSLATE, TRANSCRIBE, _, PLAIN = range(8, 16)
FIRST, NUM_STAMPS = 16, 1501
WINDOW = 480_000


def stamp(seconds):
    return FIRST + round(seconds * 50)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, " w0"))
    tokenizer.decoder = decoders.Fuse()
    names = [f"<|{name}|>" for name in CONTROLS]
    names += [f"<|{i * 0.02:.2f}|>" for i in range(NUM_STAMPS)]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    assert tokenizer.token_to_id("<|0.00|>") == FIRST
    return tokenizer


class TablePipeline:
    """Pipeline whose requests return the next text of a list."""

    def __init__(self, tokenizer, texts, vocab_size=FIRST + NUM_STAMPS):
        self.tokenizer, self.texts, self.requests = tokenizer, list(texts), []
        target = SimpleNamespace(
            source=SimpleNamespace(id="some/whisper"), vocab_size=vocab_size,
            encoder=EncoderEntry(3000, 80, 8, 1500), has_graph=lambda name: True,
        )  # fmt: skip
        self.bundle = SimpleNamespace(target=target, context_length=448)

    def generate(self, source, max_new_tokens, **options):
        self.requests.append({"source": source, "max_new_tokens": max_new_tokens, **options})
        return SimpleNamespace(tokens=[*self.texts.pop(0)][:max_new_tokens])

    def stream(self, source, **options):
        generation = self.generate(source, **options)
        return _Stream(generation)


class _Stream(list):
    def __init__(self, generation):
        super().__init__(["text"])
        self.generation = generation

    def close(self):
        self.generation = None


def transcriber_of(tokenizer, texts, **options):
    transcriber = Transcriber(TablePipeline(tokenizer, texts, **options))
    transcriber.source = lambda audio: audio  # spectrograms have tests of their own
    return transcriber


def transcribe(tokenizer, texts, seconds=5.0, **options):
    transcriber = transcriber_of(tokenizer, texts)
    audio = np.arange(round(seconds * 16_000), dtype=np.float32)
    transcript = transcriber.transcribe(audio, **{"language": "en", **options})
    requests = transcriber._pipeline.requests
    starts = [float(request["source"][0]) / 16_000 for request in requests]
    assert not transcriber._pipeline.texts
    return [(s.start, s.end, s.text) for s in transcript.segments], starts, requests


def test_segments_lie_between_pairs_of_timestamps(tokenizer):
    text = [stamp(0), 1, 2, stamp(2.5), stamp(2.5), 3, stamp(4.0), END]
    segments, starts, _ = transcribe(tokenizer, [text])
    assert segments == [(0.0, 2.5, " w1 w2"), (2.5, 4.0, " w3")]
    assert starts == [0.0]


def test_a_window_begins_after_the_last_complete_segment(tokenizer):
    texts = [
        [stamp(0.5), 1, stamp(20), stamp(20), 2, stamp(28.5), stamp(29), END],
        [stamp(0), 3, stamp(4), END],
    ]
    segments, starts, _ = transcribe(tokenizer, texts, 35)
    assert segments == [(0.5, 20.0, " w1"), (20.0, 28.5, " w2"), (28.5, 32.5, " w3")]
    assert starts == [0.0, 28.5]


def test_a_text_that_is_cut_off_is_decoded_again_from_its_last_segment(tokenizer):
    texts = [[stamp(0), 1, stamp(10), stamp(10), 2, 3, 3], [stamp(0), 2, stamp(2), END]]
    segments, starts, _ = transcribe(tokenizer, texts, 12)
    assert segments == [(0.0, 10.0, " w1"), (10.0, 12.0, " w2")]
    assert starts == [0.0, 10.0]


@pytest.mark.parametrize(
    ("text", "end"),
    [([stamp(0), 1, 2, END], 12.0), ([stamp(0), 1, stamp(3), END], 3.0), ([1, 2, END], 12.0)],
)
def test_a_window_without_pairs_is_one_segment(tokenizer, text, end):
    segments, starts, _ = transcribe(tokenizer, [text], 12)
    assert [(start, stop) for start, stop, _ in segments] == [(0.0, end)]
    assert starts == [0.0]


def test_windows_without_text_have_no_segment(tokenizer):
    texts = [[stamp(0), stamp(30), END], [stamp(0), 1, stamp(1), END]]
    segments, starts, _ = transcribe(tokenizer, texts, 31)
    assert segments == [(30.0, 31.0, " w1")]
    assert starts == [0.0, 30.0]


def test_without_timestamps_segments_are_windows(tokenizer):
    segments, starts, requests = transcribe(
        tokenizer, [[1, END], [2, END]], 40, timestamps=False, task="translate", language="fr"
    )
    assert segments == [(0.0, 30.0, " w1"), (30.0, 40.0, " w2")]
    assert starts == [0.0, 30.0]
    for request in requests:
        assert request["decoder_prefix"] == [FRENCH, TRANSLATE, PLAIN]
        assert request["timestamps"] is None


def test_options_apply_to_every_window(tokenizer):
    texts = [[stamp(0), 1, stamp(30), END], [stamp(0), 1, stamp(1), END]]
    *_, requests = transcribe(tokenizer, texts, 31, temperature=0.5, seed=7, num_draft_tokens=3)
    assert [request["seed"] for request in requests] == [7, 8]
    for request in requests:
        assert (request["temperature"], request["num_draft_tokens"]) == (0.5, 3)
        assert request["decoder_prefix"] == [ENGLISH, TRANSCRIBE]
        rules = request["timestamps"]
        assert (rules.first, rules.end, rules.max_initial) == (FIRST, END, 50)


def test_the_language_is_detected_from_the_first_window(tokenizer):
    texts = [[FRENCH], *[[stamp(0), 1, stamp(1), END]] * 2]
    _, _, requests = transcribe(tokenizer, texts, 31, language=None)
    assert requests[0]["decoder_prefix"] == []
    assert requests[0]["max_new_tokens"] == 1
    assert set(requests[0]["logit_bias"]) == {ENGLISH, FRENCH}
    assert len(requests[0]["source"]) == WINDOW
    for request in requests[1:]:
        assert request["decoder_prefix"] == [FRENCH, TRANSCRIBE]


def test_a_cancelled_transcript_ends_before_its_next_round(tokenizer):
    transcriber = transcriber_of(tokenizer, [[stamp(0), END]] * 3)
    answers = iter([False, False, False, True])  # before windows and rounds
    audio = np.zeros(3 * WINDOW, np.float32)
    found = transcriber.transcribe(audio, "en", is_cancelled=lambda: next(answers))
    assert found.segments == []
    assert len(transcriber._pipeline.requests) == 2


def test_unknown_languages_and_tasks_are_refused(tokenizer):
    audio = np.zeros(100, np.float32)
    for options, message in (
        ({"language": "english"}, "language must be a code such as en, got 'english'"),
        ({"task": "summarize"}, "task must be transcribe or translate, got 'summarize'"),
    ):
        with pytest.raises(OptionError, match=message):
            transcriber_of(tokenizer, []).transcribe(audio, **options)


def test_models_for_english_have_no_language_tokens(tokenizer, monkeypatch):
    monkeypatch.setattr("specedge.runtime.audio.speech_tokens._ENGLISH_END", END)
    segments, _, requests = transcribe(tokenizer, [[stamp(0), 1, stamp(1)]], 1, language=None)
    assert segments == [(0.0, 1.0, " w1")]
    assert requests[0]["decoder_prefix"] == []
    for options in ({"language": "fr"}, {"task": "translate"}):
        with pytest.raises(OptionError, match="the model is for English only"):
            transcriber_of(tokenizer, []).transcribe(np.zeros(9, np.float32), **options)


def test_a_tokenizer_without_timestamps_transcribes_without_them(tokenizer):
    transcriber = transcriber_of(tokenizer, [[1, END]], vocab_size=FIRST)
    audio = np.zeros(16_000, np.float32)
    with pytest.raises(OptionError, match="tokenizer has no timestamps"):
        transcriber.transcribe(audio, "en")
    assert transcriber.transcribe(audio, "en", timestamps=False).text == "w1"


def test_other_models_are_refused(tokenizer, pipeline):
    with pytest.raises(BundleError, match="does not read speech; export a Whisper model"):
        Transcriber(pipeline)
    without = TablePipeline(pipeline.tokenizer, [])
    with pytest.raises(BundleError, match=r"some/whisper is not a Whisper model: .*notimestamps"):
        Transcriber(without)
