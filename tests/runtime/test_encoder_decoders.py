"""Encoder-decoders: sources, constant states, their reuse, and exactness with every drafter."""

import dataclasses
from itertools import zip_longest

import numpy as np
import pytest

import specedge
from encoder_decoder_bundles import (
    CONTEXT,
    END,
    FRENCH,
    GERMAN,
    HIDDEN,
    NUM_MEL_BINS,
    PAD,
    ROWS,
    SOURCE,
    VOCAB_SIZE,
    make_encoder_decoder,
)
from exact import distribution_of_strings, joint_distribution
from fakes import TableModel, hashed_distribution, quarters
from specedge.bundle import Bundle
from specedge.errors import (
    ContextLengthError,
    DeviceError,
    OptionError,
    PromptError,
    SpecEdgeError,
)
from specedge.runtime.backend.memory import pair_memory
from specedge.runtime.backend.model_session import ModelSession, choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.backend.source_encoder import SourceEncoder
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import greedy_token
from specedge.runtime.sampling.source import Source
from specedge.sampling_options import Sampling

PROMPTS = ("w1 w2 w3 w4", "w5 w7 w8 w9 w12 w1", "w30")
TOKENS = 40
OPTIONS = {"max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module", params=["own", "shared"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_encoder_decoder(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def pair(folder):
    with specedge.load(folder) as pipeline:
        yield pipeline


def plain_tokens(bundle, source, first, count=TOKENS):
    """Greedy text by one pass over everything for each token, in a new model."""
    model = OrtModel(bundle, bundle.target, Device())
    model.open(Source(source))
    tokens = [*first]
    for _ in range(count):
        model.truncate(0)
        tokens.append(int(model.forward(tokens)[-1].largest(1)[0][0]))
    return tokens[len(first) :]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_the_target_s_for_every_k(pair, prompt):
    source = pair.prompts.tokens(prompt)
    assert source[-1] == END
    expected = plain_tokens(pair.bundle, source, [PAD, FRENCH])
    for k in range(9):
        generation = pair.generate(prompt, num_draft_tokens=k, **OPTIONS)
        assert generation.tokens == expected
        assert generation.stats.num_prompt_tokens == len(source)
        tested = generation.stats.num_tested
        assert not tested or 0 < generation.stats.num_accepted < tested  # there were rollbacks


def test_text_depends_on_the_source_alone(pair):
    texts = [pair.generate(prompt, **OPTIONS).tokens for prompt in (*PROMPTS, *PROMPTS)]
    assert texts[:3] == texts[3:]
    assert len({*map(tuple, texts)}) == 3


@pytest.mark.parametrize("drafter", ["suffix", "lookup", "chain", "auto", "random"])
def test_no_drafter_changes_the_text(pair, drafter):
    expected = pair.generate(PROMPTS[0], num_draft_tokens=0, **OPTIONS).tokens
    assert pair.generate(PROMPTS[0], drafter=drafter, **OPTIONS).tokens == expected


def test_the_draft_reads_the_request_s_source(pair):
    for prompt in PROMPTS:
        pair.generate(prompt, 4, num_draft_tokens=2, ignore_eos=True)
        assert pair.target.source == pair.draft.source == Source(pair.prompts.tokens(prompt))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_coupled_text_depends_on_the_seed_alone(pair, k):
    options = OPTIONS | {"temperature": 1.0, "coupling": "gumbel", "seed": 7}
    plain = pair.generate(PROMPTS[1], num_draft_tokens=0, **options)
    assert pair.generate(PROMPTS[1], num_draft_tokens=k, **options).tokens == plain.tokens


def test_equal_sources_share_their_prefix_and_others_do_not(pair):
    first = pair.generate(PROMPTS[0], **OPTIONS)
    other = pair.generate(PROMPTS[1], **OPTIONS)
    assert other.stats.num_reused_tokens == 0
    again = pair.generate(PROMPTS[1], **OPTIONS)
    assert again.stats.num_reused_tokens == again.stats.num_prompt_tokens
    assert again.tokens == other.tokens
    assert pair.generate(PROMPTS[0], **OPTIONS).tokens == first.tokens


def test_the_encoder_runs_once_per_source(folder, monkeypatch):
    calls = []
    hidden = SourceEncoder.hidden

    def counted(encoder, source):
        before = encoder._source
        result = hidden(encoder, source)
        calls.append(before != source)
        return result

    monkeypatch.setattr(SourceEncoder, "hidden", counted)
    with specedge.load(folder) as pipeline:
        assert not calls  # the load runs no encoder
        for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1]):
            pipeline.generate(prompt, 8, num_draft_tokens=2, ignore_eos=True)
        num_encoders = 1 if not pipeline.bundle.draft.has_graph("encoder") else 2
        assert sum(calls) == 2 * num_encoders
        pipeline.forget()
        pipeline.generate(PROMPTS[1], 8, num_draft_tokens=2, ignore_eos=True)
        assert sum(calls) == 3 * num_encoders


@pytest.mark.parametrize("graph", ["encoder", "open"])
def test_a_source_that_failed_is_not_reused(folder, monkeypatch, graph):
    plain = {"max_new_tokens": 8, "num_draft_tokens": 0, "ignore_eos": True}
    with specedge.load(folder) as pipeline:
        expected = pipeline.generate(PROMPTS[1], **plain).tokens
        pipeline.generate(PROMPTS[0], **plain)
        run = ModelSession.map

        def fail(session, values, outputs):
            run(session, values, outputs)
            if ("hidden" in outputs) is (graph == "encoder"):
                raise SpecEdgeError("out of memory")

        monkeypatch.setattr(ModelSession, "map", fail)
        with pytest.raises(SpecEdgeError, match="out of memory"):
            pipeline.generate(PROMPTS[1], **plain)
        monkeypatch.setattr(ModelSession, "map", run)
        assert pipeline.generate(PROMPTS[1], **plain).tokens == expected


def test_encoding_counts_as_prefill(pair):
    pair.forget()
    num_before = pair.slots.engine.num_passes_by_length[SOURCE]
    options = {"max_new_tokens": 4, "num_draft_tokens": 2, "ignore_eos": True}
    first, again = (pair.generate([7] * SOURCE, **options).stats for _ in range(2))
    assert first.prefill_seconds > again.prefill_seconds == 0
    assert pair.slots.engine.num_passes_by_length[SOURCE] == num_before + 1


def test_slots_with_different_sources_do_not_affect_each_other(folder, pair):
    expected = [pair.generate(prompt, **OPTIONS).tokens for prompt in PROMPTS]
    with specedge.load(folder, slots=2) as pipeline:
        assert "take turns" in " ".join(pipeline.notes)
        results = pipeline.generate_batch([*PROMPTS, *PROMPTS], **OPTIONS)
        assert [result.tokens for result in results] == expected * 2
        streams = [pipeline.stream(prompt, **OPTIONS) for prompt in PROMPTS[:2]]
        for _ in zip_longest(*streams):
            pass
        assert [stream.generation.tokens for stream in streams] == expected[:2]
        # A request gets the slot of its source.
        for i in (1, 0, 0, 1, 1, 0):
            assert pipeline.generate(PROMPTS[i], **OPTIONS).stats.num_reused_tokens


def test_decoder_prefix_begins_the_text(pair):
    source = pair.prompts.tokens(PROMPTS[0])
    for prefix, first in (
        (None, [PAD, FRENCH]),
        ("deu_Latn", [PAD, GERMAN]),
        ([GERMAN, 7], [PAD, GERMAN, 7]),
        ("deu_Latn w2", [PAD, GERMAN, 7]),
        ("", [PAD]),
    ):
        expected = plain_tokens(pair.bundle, source, first, 12)
        options = {"max_new_tokens": 12, "ignore_eos": True, "decoder_prefix": prefix}
        assert pair.generate(PROMPTS[0], **options).tokens == expected
    assert "w2" not in pair.generate(PROMPTS[0], 1, decoder_prefix="w2").text.split()[:1]


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        ([VOCAB_SIZE], f"decoder_prefix: token {VOCAB_SIZE} is not between 0 and 39"),
        ([5] * (CONTEXT - 1), "shorten it"),
        (3, "must be text or token ids"),
        ([True], "must be text or token ids"),
        (b"fra", "must be text or token ids"),
    ],
)
def test_a_bad_decoder_prefix_is_an_error(pair, prefix, problem):
    with pytest.raises(OptionError, match=problem) as caught:
        pair.generate(PROMPTS[0], decoder_prefix=prefix)
    assert caught.value.option == "decoder_prefix"


def test_a_decoder_only_model_has_no_decoder_prefix():
    with specedge.load() as pipeline, pytest.raises(OptionError, match="encoder-decoders"):
        pipeline.generate("x", decoder_prefix="y")
    with specedge.load() as pipeline, pytest.raises(PromptError, match="has no encoder"):
        pipeline.generate(Source([1]))


def test_a_source_has_a_maximum_length(pair):
    assert pair.generate([7] * SOURCE, 2, ignore_eos=True).stats.num_prompt_tokens == SOURCE
    with pytest.raises(ContextLengthError, match=f"has {SOURCE + 1} tokens.*at most {SOURCE}"):
        pair.generate([7] * (SOURCE + 1))
    with pytest.raises(PromptError, match="empty"):
        pair.generate("")


def test_chats_and_scores_are_refused(pair):
    for refused in (
        lambda: pair.chat([{"role": "user", "content": "w1"}]),
        lambda: pair.stream_chat([{"role": "user", "content": "w1"}]),
        lambda: pair.score([5, 6], 1),
    ):
        with pytest.raises(PromptError, match="is an encoder-decoder"):
            refused()


def test_text_ends_with_the_context(pair):
    generation = pair.generate(PROMPTS[0], 1000, ignore_eos=True, num_draft_tokens=4)
    assert len(generation.tokens) == CONTEXT - 2
    assert generation.finish_reason == "context"


def test_penalties_count_decoder_tokens_only(pair):
    """Compare penalties with transformers', which count the tokens of the decoder."""
    prompt = [5, 6, 7, END]
    options = {"repetition_penalty": 1.7, "frequency_penalty": 0.3}
    model = OrtModel(pair.bundle, pair.bundle.target, Device())
    model.open(Source(prompt))
    history = History([PAD, FRENCH])
    for _ in range(20):
        model.truncate(0)
        row = model.forward(history.tokens)[-1]
        history.extend([greedy_token(row, Sampling(**options), history)])
    expected = history.tokens[2:]
    for k in (0, 4):
        generation = pair.generate(prompt, 20, num_draft_tokens=k, ignore_eos=True, **options)
        assert generation.tokens == expected


def test_logprobs_do_not_depend_on_k(pair):
    options = {"max_new_tokens": 16, "ignore_eos": True, "logprobs": 3}
    plain = pair.generate(PROMPTS[2], num_draft_tokens=0, **options)
    assert pair.generate(PROMPTS[2], num_draft_tokens=3, **options).logprobs == plain.logprobs


def test_constants_are_written_up_to_the_source_s_length(pair):
    model = OrtModel(pair.bundle, pair.bundle.target, Device())
    names = [state.name for state in pair.bundle.target.constants]
    full = [model.cache.arrays[name].copy() for name in names]
    assert all(np.abs(array).min(axis=(0, 1, 3)).all() for array in full)  # synthetic rows
    model.open(Source([5, 6, 7]))
    assert model.cache.source_length.tolist() == [3]
    for name in names:
        array = model.cache.arrays[name]
        assert np.abs(array[:, :, :3]).min() > 0
        assert not array[:, :, 3:].any()
    assert len(model.cache_rows(0, 1)) == len(pair.bundle.target.states) - len(names)


def test_another_source_empties_the_cache(pair):
    model = OrtModel(pair.bundle, pair.bundle.target, Device())
    model.open(Source([5, 6]))
    model.forward([0, 1])
    model.open(Source([5, 6]))
    assert model.length == model.shared([0, 1], Source([5, 6])) == 2
    assert model.shared([0, 1], Source([5, 7])) == model.shared([0, 1]) == 0
    model.open(Source([5, 7]))
    assert model.length == 0


def test_sources_are_equal_by_content():
    assert Source([1, 2]) == Source(np.array([1, 2]))
    assert len({Source([1, 2]), Source((1, 2)), Source([2, 1]), Source([1])}) == 3
    features = np.zeros((2, 3))
    source = Source(features)
    features[0, 0] = 1
    assert source == Source(np.zeros((2, 3)))
    assert source != Source(features)
    assert (source.tokens, source.length) == ([], 3)
    assert History([0], source=source).then([1]).source is source


def test_the_draft_reads_a_source_that_it_has_tokens_for():
    drafter = DraftModel(TableModel(lambda text: [1]), vocab_size=5, max_source_length=3)
    assert drafter.readable_source(Source([4, 7, 1, 2])) == Source([4, 0, 1])
    spectrogram = Source(np.ones((2, 9)))
    assert drafter.readable_source(spectrogram) is spectrogram


class SourceTable(TableModel):
    """A table model whose distribution depends on the open source, too."""

    source = None
    num_opened = 0

    def open(self, source):
        self.num_opened += 1
        if source != self.source:
            self.truncate(0)
        self.source = source
        distributions = self.distributions
        self.distribution = lambda text: distributions((*source.tokens, *text))

    def __init__(self, distribution):
        super().__init__(distribution)
        self.distributions = distribution


def test_every_text_has_the_target_s_probability(monkeypatch):
    """Exactly, for all random numbers on a grid, whatever source was open before."""
    target, draft = quarters(3, certain=True), quarters(4, certain=False)
    source, other = Source([2, 1]), Source([1])

    class Decoder(SpeculativeDecoder):
        def rounds(self, *arguments):
            return super().rounds(*arguments, source=source)

    models = [SourceTable(target), SourceTable(draft)]

    def make():
        for model in models:
            model.open(other)
            model.forward([0, 1])
        return Decoder(models[0], FixedPlan(DraftModel(models[1]), 2), Stopwatch())

    expected = distribution_of_strings(lambda text: target((2, 1, *text)))
    assert joint_distribution(make, monkeypatch) == expected


def test_a_source_is_opened_once():
    model = SourceTable(hashed_distribution(1, 3, 0.25))
    decoder = SpeculativeDecoder(model, FixedPlan(Suffix(), 2), Stopwatch())
    for source, num_opened in (([1], 1), ([1], 1), ([2], 2)):
        list(decoder.rounds([0], Sampling(), 0, 9, source=Source(source)))
        assert model.num_opened == num_opened


def test_suffix_decoding_copies_from_the_source():
    source = Source([9, 8, 7, 6, 5, 4, 3])

    def drafted(text, source=source, drafter=None):
        history = History(text, source=source)
        return (drafter or Suffix()).propose(history, 4, Sampling(), np.zeros(0)).tokens

    assert drafted([0, 8, 7, 6]) == [5, 4, 3]
    assert drafted([0, 8, 7, 6], None) == []
    # The beginning of the text does not continue the source.
    assert drafted([3, 2], Source([1, 2])) == []
    assert drafted([0, 8, 7, 6], Source(np.ones((2, 9)))) == []
    drafter = Suffix()
    assert drafted([0, 8, 7, 6], drafter=drafter) == [5, 4, 3]
    drafter.truncate(2)  # a rollback rebuilds the index, with the source
    assert drafted([0, 8, 7, 6], drafter=drafter) == [5, 4, 3]
    drafter.truncate(0)
    assert drafted([0, 8, 7, 6], Source([8, 7, 6, 2]), drafter) == [2]


def test_memory_counts_encoder_and_constants(pair):
    bundle = pair.bundle
    need = pair_memory(bundle, dict.fromkeys(bundle.models, "onnx"), slots=3)
    for model, entry in zip(need.models, bundle.models.values(), strict=True):
        size = 4 * 2 * len(entry.layers) * ROWS * HIDDEN
        assert model.constants == 3 * size == 3 * entry.cache_size("onnx", "constant")
    assert need.with_slots(1).constants == need.constants // 3
    assert need.parts["caches"] == need.caches + need.constants


def test_engines_are_refused(pair):
    with pytest.raises(DeviceError, match="tensorrt does not run encoder-decoders"):
        choose_ops(pair.bundle.target, "auto", Device("tensorrt"))


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    make_encoder_decoder(folder, is_speech=True)
    with specedge.load(folder) as pipeline:
        yield pipeline


def test_spectrograms_are_sources(speech):
    random = np.random.default_rng(0)
    texts = []
    for _ in range(2):
        source = Source(random.standard_normal((NUM_MEL_BINS, 2 * ROWS)))
        plain = speech.generate(source, num_draft_tokens=0, **OPTIONS).tokens
        texts.append(plain)
        assert speech.generate(source, num_draft_tokens=3, **OPTIONS).tokens == plain
        assert speech.generate(source, drafter="suffix", **OPTIONS).tokens == plain
    assert texts[0] != texts[1]


def test_prompts_of_another_kind_are_refused(speech, pair):
    for prompt, problem in (
        ("w1", "reads speech instead of text"),
        (Source([1, 2]), "log-mel spectrograms of shape"),
        (Source(np.zeros((3, 2 * ROWS))), r"of shape \[4, 64\], got \[3, 64\]"),
    ):
        with pytest.raises(PromptError, match=problem):
            speech.generate(prompt)
    with pytest.raises(PromptError, match="empty"):
        pair.generate(Source(np.zeros((3, 4))))
    assert pair.generate(Source([5, 6]), 3).tokens == pair.generate([5, 6], 3).tokens


def test_a_draft_reads_what_the_target_reads(tmp_path):
    bundle = make_encoder_decoder(tmp_path / "tokens")
    speech = make_encoder_decoder(tmp_path / "speech", is_speech=True)
    mixed = bundle.models | {"draft": speech.draft}
    with pytest.raises(ValueError, match="the same tokens or spectrograms"):
        Bundle(**vars_of(bundle) | {"models": mixed})
    graphs = tuple(graph for graph in bundle.target.graphs if graph.name != "encoder")
    without = {"target": dataclasses.replace(bundle.target, graphs=graphs)}
    with pytest.raises(ValueError, match="must have the graph 'encoder'"):
        Bundle(**vars_of(bundle) | {"models": bundle.models | without})
    with pytest.raises(ValueError, match="decoder_prefix must be shorter"):
        make_encoder_decoder(tmp_path / "long", prefix=[FRENCH] * CONTEXT)


def vars_of(bundle):
    return {name: value for name, value in vars(bundle).items() if name != "folder"}
