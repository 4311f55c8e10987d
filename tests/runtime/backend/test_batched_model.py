"""Passes over several slots, compared with the decoder bit by bit."""

import dataclasses
import json
import shutil
import weakref
from unittest.mock import Mock

import numpy as np
import onnx
import onnxruntime
import pytest

from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from specedge.bundle import MANIFEST, Bundle
from specedge.bundle.batched_signature import BATCHED, batched
from specedge.bundle.integrity import file_entry
from specedge.bundle.manifest import HiddenStates, signatures
from specedge.errors import BundleError
from specedge.exporter import export
from specedge.runtime.backend.batched_model import BatchedSession, OrtBatchedModel
from specedge.runtime.backend.batched_self_test import share_passes
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.requests import loader

NUM_SLOTS = 4
TEXT = [7 * i % 500 for i in range(300)]


@pytest.fixture(scope="module")
def bundle(pipeline):
    return pipeline.bundle


@pytest.fixture(scope="module", params=["target", "draft"])
def entry(request, bundle):
    return bundle.models[request.param]


@pytest.fixture(scope="module")
def shared(bundle, entry):
    """Return the models of slots that share passes."""
    models, note = share_passes(bundle, entry, Device(), open_slots(bundle, entry))
    assert note is None
    return models


@pytest.fixture(scope="module")
def decoder(bundle, entry):
    return OrtModel(bundle, entry, Device())


@pytest.fixture
def slots(shared):
    for model in shared:
        model.truncate(0)
    return shared


def open_slots(bundle, entry, count=NUM_SLOTS):
    first = OrtModel(bundle, entry, Device())
    return [first, *(first.with_new_cache() for _ in range(count - 1))]


def alone(decoder, text, past, length):
    """Return logits of the last tokens of a text, and all its cache rows, by the decoder."""
    decoder.truncate(0)
    decoder.prefill(text[:past])
    logits = decoder.forward(text[past : past + length]).array().copy()
    return logits, decoder.cache_rows(0, past + length)


def run(slots, texts, pasts, lengths, num_rows=None):
    """Run one pass over slots, each after its own past; return the logits of those with tokens."""
    feeds = []
    for i, model in enumerate(slots):
        model.truncate(0)
        model.prefill(texts[i][: pasts[i]])
        if lengths[i]:
            tokens = texts[i][pasts[i] : pasts[i] + lengths[i]]
            feeds.append((model, tokens, lengths[i] if num_rows is None else num_rows[i]))
    found = slots[0].batch.forward(feeds)
    return dict(zip((i for i, n in enumerate(lengths) if n), found, strict=True))


def texts():
    return [TEXT[3 * i + 1 :] for i in range(NUM_SLOTS)]


def check(decoder, slots, pasts, lengths):
    logits = run(slots, texts(), pasts, lengths)
    for i, model in enumerate(slots):
        expected, rows = alone(decoder, texts()[i], pasts[i], lengths[i] or 1)
        assert model.length == pasts[i] + lengths[i]
        for mine, its in zip(model.cache_rows(0, model.length), rows, strict=True):
            assert np.array_equal(mine, its[:, : model.length])
        if lengths[i]:
            assert np.array_equal(logits[i].array(), expected)


@pytest.mark.parametrize(
    ("pasts", "lengths"),
    [
        ((40, 7, 19, 3), (1, 1, 1, 1)),
        ((40, 7, 19, 3), (5, 5, 5, 5)),
        ((40, 7, 0, 3), (5, 1, 3, 0)),
        ((0, 7, 19, 3), (0, 2, 0, 1)),
        ((0, 90, 19, 0), (64, 1, 5, 17)),
        ((3, 3, 3, 3), (0, 0, 1, 0)),
    ],
)
def test_rows_of_each_slot_are_bitwise_those_of_the_decoder(decoder, slots, pasts, lengths):
    check(decoder, slots, pasts, lengths)


def test_only_requested_rows_have_logits(decoder, slots):
    pasts, lengths, num_rows = (0, 7, 19, 3), (33, 5, 5, 1), (0, 2, 5, 1)
    logits = run(slots, texts(), pasts, lengths, num_rows)
    assert logits[0] is None
    for i, count in enumerate(num_rows[1:], 1):
        expected, _ = alone(decoder, texts()[i], pasts[i], lengths[i])
        assert np.array_equal(logits[i].array(), expected[lengths[i] - count :])


def test_rows_stay_exact_beside_a_chunk_at_the_end_of_the_context(decoder, slots, entry):
    end = entry.context_length
    text = [TEXT[i % len(TEXT)] for i in range(end)]
    slots[0].prefill(text[: end - 1])
    found = slots[0].batch.forward([(slots[0], text[end - 1 :], 1), (slots[1], TEXT[:64], 1)])
    for logits, (tokens, past) in zip(found, [(text, end - 1), (TEXT[:64], 0)], strict=True):
        expected, _ = alone(decoder, tokens, past, len(tokens) - past)
        assert np.array_equal(logits.array(), expected[-1:])
    assert [slots[0].length, slots[1].length] == [end, 64]


def test_rollback_of_one_slot_leaves_the_others(decoder, slots):
    a, b = texts()[:2]
    run(slots, texts(), (10, 20, 0, 0), (5, 5, 0, 0))
    slots[0].truncate(11)
    found = slots[0].batch.forward([(slots[0], a[50:53], 3), (slots[1], b[25:26], 1)])
    expected, _ = alone(decoder, a[:11] + a[50:53], 11, 3)
    assert np.array_equal(found[0].array(), expected)
    assert np.array_equal(found[1].array(), alone(decoder, b, 25, 1)[0])


def test_pass_after_an_interrupted_one_is_exact(decoder, slots, monkeypatch):
    lengths = (3, 3, 2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(BatchedSession, "run_slots", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(slots, texts(), (4, 9, 2, 6), lengths)
    check(decoder, slots, (40, 7, 19, 3), lengths)


@pytest.mark.parametrize("length", [1, 2, 5, 18])
def test_single_passes_of_a_slot_equal_those_of_the_decoder(decoder, slots, length):
    slots[2].prefill(TEXT[:30])
    found = slots[2].forward(TEXT[30 : 30 + length]).array()
    assert np.array_equal(found, alone(decoder, TEXT, 30, length)[0])


@pytest.mark.parametrize(
    "name", ["block_rows", "packed_rows", "logits_rows", "last_positions", "query_lengths"]
)
def test_self_test_finds_mixed_up_sequences(bundle, monkeypatch, name):
    stage = OrtBatchedModel._stage

    def reverse(self, inputs):
        return stage(self, inputs | {name: [*inputs[name]][::-1]})

    monkeypatch.setattr(OrtBatchedModel, "_stage", reverse)
    models, note = share_passes(bundle, bundle.target, Device(), open_slots(bundle, bundle.target))
    assert "take turns" in note
    assert [model.batch for model in models] == [None] * NUM_SLOTS
    models[1].prefill(TEXT[:3])
    assert models[1].forward(TEXT[3:5]).array().shape == (2, bundle.target.vocab_size)


@pytest.mark.parametrize("limit", [2, 12, 40])
def test_self_test_finds_a_rounding_error_in_long_passes(bundle, monkeypatch, limit):
    run_pass = OrtBatchedModel._run

    def moved(self, feeds, block_length):
        rows = run_pass(self, feeds, block_length)
        if sum(len(tokens) for _, tokens, _ in feeds) >= limit:
            rows[-1][..., 3] = np.nextafter(rows[-1][..., 3], np.float32(np.inf))
        return rows

    monkeypatch.setattr(OrtBatchedModel, "_run", moved)
    _, note = share_passes(bundle, bundle.target, Device(), open_slots(bundle, bundle.target))
    assert bundle.target.source.id in note


def test_requests_take_turns_without_a_batched_graph(bundle):
    model = OrtModel(bundle, bundle.target, Device(), "onnx")
    models, note = share_passes(bundle, bundle.target, Device(), [model])
    assert models == [model]
    assert "no batched graph" in note


def test_older_onnxruntime_never_opens_the_batched_graph(bundle, monkeypatch):
    models = open_slots(bundle, bundle.target)
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.0")
    monkeypatch.setattr(Device, "open", None)
    found, note = share_passes(bundle, bundle.target, Device(), models)
    assert found == models
    assert "1.32" in note


def test_decoder_is_freed_before_the_batched_graph_opens(bundle, tmp_path, monkeypatch):
    """The weights, which each session packs, are in memory once."""
    # Tests share the sessions of the embedded pair itself.
    bundle = Bundle.read(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    sessions, alive, open_session = [], [], Device.open

    def recorded(device, path):
        if BATCHED in path.name:
            alive.extend(session() for session in sessions)
        session = open_session(device, path)
        sessions.append(weakref.ref(session))
        return session

    monkeypatch.setattr(Device, "open", recorded)
    share_passes(bundle, bundle.target, Device(), open_slots(bundle, bundle.target))
    assert alive == [None]


def test_one_slot_opens_no_batched_graph(bundle, monkeypatch):
    opened, open_session = [], Device.open

    def recorded(device, path):
        opened.append(path.name)
        return open_session(device, path)

    monkeypatch.setattr(Device, "open", recorded)
    loader.load(bundle.folder).close()
    assert not [name for name in opened if BATCHED in name]


def test_text_does_not_depend_on_the_number_of_slots(bundle):
    texts = []
    for slots in (1, 3):
        with loader.load(bundle.folder, slots=slots) as pipeline:
            assert (pipeline.target.batch is not None) is (slots > 1)
            texts.append(
                [
                    pipeline.generate("def f(", max_new_tokens=20, temperature=x, seed=1).text
                    for x in (0, 1)
                ]
            )
    assert texts[0] == texts[1]


def remove_input(tensors):
    del tensors[1]


def change_role(tensors):
    tensors[1]["role"] = "unknown"


def change_shape(tensors):
    tensors[1]["shape"] = ["T", 1]


@pytest.mark.parametrize("change", [remove_input, change_role, change_shape])
def test_inconsistent_signature_is_refused(bundle, tmp_path, change):
    manifest = json.loads((bundle.folder / MANIFEST).read_text("utf-8"))
    change(manifest["models"]["target"]["signatures"][BATCHED]["inputs"])
    (tmp_path / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(
        BundleError,
        match=f"{MANIFEST}: key 'models.target': target/batched-gqa.onnx: its signature",
    ) as error:
        Bundle.read(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ("target/decoder-gqa.onnx", "block_rows is missing"),
        ("draft/batched-gqa.onnx", "past_key_values.0.key is"),
        (MANIFEST, "not an ONNX graph"),
    ],
)
def test_other_file_than_the_batched_graph_is_refused(bundle, tmp_path, other, problem):
    folder = shutil.copytree(bundle.folder, tmp_path / "copy")
    file = bundle.target.graph(BATCHED, "gqa").file
    shutil.copy(folder / other, folder / file)
    files = bundle.files | {file: file_entry(folder / file)}
    text = dataclasses.replace(bundle, files=files).to_json()
    (folder / MANIFEST).write_text(text, "utf-8")
    with pytest.raises(BundleError, match=problem) as error:
        loader.load(folder, slots=2)
    assert str(error.value).startswith(f"{folder / file}: ")
    assert "\n" not in str(error.value)


def test_passes_have_at_most_as_many_tokens_as_rotary_tables_have_rows(tmp_path):
    """Rotary embedding of gpt_neox is partial, so it is a node outside of attention."""
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = make_model(ARCHITECTURES["gpt_neox"][1]())
    checkpoint = save(model, tokenizer, tmp_path / "model")
    bundle = export(None, checkpoint, tmp_path / "bundle", max_length=64, precision="fp32")
    with loader.load(bundle.folder, slots=24) as pipeline:  # of up to 5 tokens each
        batch = pipeline.slots.all[0].target.batch
        assert batch is not None
        assert 0 < batch.max_rows <= bundle.target.capacity
        alone = pipeline.generate("def f", 8, seed=1, temperature=1.0).tokens
        results = pipeline.generate_batch(["def f"] * 24, 8, seed=1, temperature=1.0)
        assert results[0].tokens == alone


@pytest.fixture(scope="module")
def with_states(bundle, tmp_path_factory):
    """The pair's target, returning the inputs of layers 1, 3 and 5 in two of its graphs."""
    folder = shutil.copytree(bundle.folder, tmp_path_factory.mktemp("states") / "copy")
    size = onnx_states(folder, bundle)
    hidden = HiddenStates((1, 3, 5), size)
    target, files = bundle.target, dict(bundle.files)
    for name in ("decoder", BATCHED):
        file = target.graph(name, "gqa").file
        files[file] = file_entry(folder / file)
    decoders = signatures(target.states, target.capacity, target.padded_vocab_size, hidden=hidden)
    decoders[BATCHED] = batched(decoders["chosen_logits"])
    target = dataclasses.replace(target, hidden=hidden, signatures=decoders)
    models = bundle.models | {"target": target}
    text = dataclasses.replace(bundle, models=models, files=files).to_json()
    (folder / MANIFEST).write_text(text, "utf-8")
    return Bundle.read(folder)


def onnx_states(folder, bundle):
    """Add the output to the graphs; return the number of channels."""
    for name in ("decoder", BATCHED):
        path = folder / bundle.target.graph(name, "gqa").file
        model = onnx.load(path, load_external_data=False)
        norms = [node for node in model.graph.node if node.op_type == "LayerNormalization"]
        inputs = [norms[2 * layer].input[0] for layer in (1, 3, 5)]
        bias = next(t for t in model.graph.initializer if t.name.endswith("ln_f.bias"))
        size = 3 * bias.dims[0]
        model.graph.node.append(onnx.helper.make_node("Concat", inputs, ["hidden"], axis=-1))
        model.graph.output.append(
            onnx.helper.make_tensor_value_info("hidden", onnx.TensorProto.FLOAT, [1, "T", size])
        )
        onnx.save(model, path)
    return size


def test_shared_passes_return_the_hidden_states_of_each_slot(with_states):
    entry = with_states.target
    decoder = OrtModel(with_states, entry, Device())
    slots, note = share_passes(with_states, entry, Device(), open_slots(with_states, entry))
    assert note is None
    for pasts, lengths in (((40, 7, 19, 3), (5, 1, 3, 2)), ((0, 7, 19, 3), (17, 2, 0, 1))):
        run(slots, texts(), pasts, lengths)
        for i in (i for i in range(NUM_SLOTS) if lengths[i]):
            alone(decoder, texts()[i], pasts[i], lengths[i])
            assert slots[i].hidden.shape == (lengths[i], entry.hidden.size)
            np.testing.assert_array_equal(slots[i].hidden, decoder.hidden)
