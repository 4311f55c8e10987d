"""docs/bundle.md matches the code and suffices to implement a reader."""

import dataclasses
import json
import types
import typing

import numpy as np
import pytest

import document_reader as reader
import specedge
from manifests import make_bundle
from specedge.bundle import FORMAT, Bundle, store
from specedge.strict_json import JsonError

PROMPT = "import json\n\n\ndef read_config(path):\n    "
PLAIN = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def assert_described(words, hint, tables, path):
    """Assert that a type of the document is that of the code, keys in order, at any depth."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        parts = [part for part in arguments if part is not type(None)]
        alternatives = words.split(" or ")
        assert ("null" in alternatives) == (type(None) in arguments), path
        for alternative, part in zip(alternatives, parts, strict=False):
            assert_described(alternative, part, tables, path)
    elif origin is tuple:
        assert words.startswith("list of "), path
        assert_described(words.removeprefix("list of "), arguments[0], tables, path)
    elif origin is dict:
        assert words.startswith("map to "), path
        assert_described(words.removeprefix("map to "), arguments[1], tables, path)
    elif dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        fields = {f.metadata.get("key", f.name): f for f in dataclasses.fields(hint) if f.init}
        rows = tables[words]
        assert list(rows) == list(fields), path
        optional = {key for key, field in fields.items() if field.metadata.get("optional")}
        assert {key for key in rows if rows[key].endswith(reader.OPTIONAL)} == optional, path
        for key, field in fields.items():
            described = rows[key].removesuffix(reader.OPTIONAL)
            assert_described(described, hints[field.name], tables, f"{path}.{key}")
    else:
        assert reader.PLAIN.get(words, float if words == "number" else None) is hint, path


def test_the_tables_list_the_keys_of_the_code_with_their_types_in_order():
    assert_described("bundle", Bundle, reader.tables(), "bundle")
    assert f"format {FORMAT}" in reader.DOCUMENT.read_text("utf-8").splitlines()[0]


@pytest.mark.slow
def test_document_and_code_reject_the_same_keys_and_types(tmp_path):
    text = make_bundle(tmp_path).to_json()
    free = ("files", "versions", "end_tokens", "invariant_lengths", "states", "graphs")

    def places(value, before=()):
        """Sample the first and last entry of lists and maps."""
        keys = list(value if isinstance(value, dict) else range(len(value)))
        if isinstance(value, list) or (before[-1:] and before[-1] in free):
            keys = list({keys[0]: 0, keys[-1]: 0}) if keys else []
        for key in keys:
            yield (*before, key)
            if isinstance(value[key], dict | list):
                yield from places(value[key], (*before, key))

    def edited(keys, values):
        manifest = inner = json.loads(text)
        for key in keys[:-1]:
            inner = inner[key]
        inner.pop(keys[-1])
        if values and isinstance(inner, dict):
            inner[keys[-1]] = values[0]
        elif values:
            inner.insert(keys[-1], values[0])
        return json.dumps(manifest)

    refused = 0
    for keys in places(json.loads(text)):
        droppable = len(keys) > 1 and keys[-2] in free
        for values in ([], [None], [[]], [{}], [True], [0.5], ["text"], [2**60]):
            if droppable and not values:
                continue
            case = edited(keys, values)
            try:
                reader.parse(case)
            except reader.WrongError:
                with pytest.raises(JsonError):
                    Bundle.from_json(case)
                refused += 1
    assert refused > 1000


def test_a_reader_written_from_the_document_reads_the_embedded_pair():
    manifest = reader.read(store.embedded_folder())
    assert manifest == json.loads(Bundle.read(store.embedded_folder()).to_json())


@pytest.fixture(scope="module")
def pipeline():
    """Use the reader's graph variant, since quantized graph variants round differently."""
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    return specedge.load(store.embedded_folder(), ops="onnx")


@pytest.fixture(scope="module")
def models(pipeline):
    """The target and the draft, with noise in stale rows."""
    options, folder = reader.session_options(), store.embedded_folder()
    entries = reader.read(folder)["models"]
    return [
        reader.Model(folder, entries[role], "onnx", options, 1e4) for role in ("target", "draft")
    ]


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 6])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02}],
    ids=["greedy", "drawn", "filtered"],
)
def test_host_written_from_document_generates_the_same_text(
    pipeline, models, sampling, num_draft_tokens
):
    prompt = pipeline.tokenizer.encode(PROMPT).ids
    found = reader.generate(*models, prompt, 24, num_draft_tokens, 2**64 - 3, {**PLAIN, **sampling})
    one = pipeline.generate(
        prompt, 24, seed=-3, num_draft_tokens=num_draft_tokens, ignore_eos=True, **sampling
    )
    assert found == (one.tokens, one.stats.num_rounds)


def test_a_host_written_from_the_document_fills_the_context(pipeline, models):
    context = models[0].entry["context_length"]
    prompt = [i % 200 + 1 for i in range(context - 9)]
    found = reader.generate(*models, prompt, 50, 4, 0, PLAIN)
    one = pipeline.generate(prompt, 50, num_draft_tokens=4, ignore_eos=True)
    assert (one.finish_reason, len(one.tokens)) == ("context", 9)
    assert found == (one.tokens, one.stats.num_rounds)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(("context", "k"), [(16, 4), (33, 1), (33, 7)])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95}])
def test_a_host_written_from_the_document_runs_a_smaller_draft(
    pipeline, models, context, k, sampling
):
    from specedge.runtime.backend.onnx_model import OrtModel
    from specedge.runtime.backend.self_test import exact_device
    from specedge.runtime.backend.sessions import Device
    from specedge.runtime.requests.pipeline import Pipeline

    target, draft = models
    smaller = {"context_length": context, "vocab_size": 700}
    entry, draft.entry = draft.entry, draft.entry | smaller
    whole = pipeline.bundle
    smaller_models = whole.models | {"draft": dataclasses.replace(whole.draft, **smaller)}
    bundle = dataclasses.replace(whole, models=smaller_models).at(whole.folder)
    model = OrtModel(bundle, bundle.draft, exact_device([bundle.draft], Device()))
    prompt = pipeline.tokenizer.encode(PROMPT).ids
    assert max(prompt) >= 700
    try:
        found = reader.generate(target, draft, prompt, 40, k, 11, {**PLAIN, **sampling})
    finally:
        draft.entry = entry
    one = Pipeline(bundle, pipeline.tokenizer, pipeline.target, model).generate(
        prompt, 40, seed=11, num_draft_tokens=k, ignore_eos=True, **sampling
    )
    assert found == (one.tokens, one.stats.num_rounds)


def test_padded_verify_pass_at_context_end_is_bitwise_equal(models):
    target, _ = models
    context = target.entry["context_length"]
    target.past_length = context - 1
    wide = target.feed([5, 7, 7, 7, 7])
    target.past_length = context - 1
    assert np.array_equal(target.feed([5])[0], wide[0])
