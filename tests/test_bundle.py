import dataclasses
import json
import struct

import pytest

from manifests import CAPACITY, STATES, make_bundle
from specedge.bundle import FORMAT, MANIFEST, Bundle, store
from specedge.bundle.integrity import file_entry
from specedge.bundle.manifest import signatures
from specedge.errors import BundleError
from specedge.strict_json import to_plain


@pytest.fixture
def folder(tmp_path):
    make_bundle(tmp_path)
    return tmp_path


def edit(folder, *keys, value=..., drop=False):
    """Change or drop the value under a path of keys, of the bundle or of a model."""
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    inner = manifest["models"] if keys[0] in ("target", "draft") else manifest
    for key in keys[:-1]:
        inner = inner[key]
    if drop:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")


def test_manifest_round_trip(tmp_path):
    written = make_bundle(tmp_path)
    assert Bundle.read(tmp_path) == written
    assert Bundle.read(tmp_path).path("tokenizer.json") == tmp_path / "tokenizer.json"


def test_a_draft_may_have_a_smaller_vocabulary_and_context(folder):
    edit(folder, "draft", "vocab_size", value=49)
    edit(folder, "draft", "context_length", value=16)
    bundle = Bundle.read(folder)
    assert (bundle.draft.vocab_size, bundle.target.vocab_size) == (49, 50)
    assert bundle.context_length == bundle.target.context_length == 32


def cut(folder, ids):
    """Cut the draft's head of 64 columns to some tokens."""
    (folder / "draft" / "ids.bin").write_bytes(struct.pack(f"<{len(ids)}i", *ids))
    edit(folder, "draft", "token_ids", value="draft/ids.bin")
    edit(folder, "files", "draft/ids.bin", value=to_plain(file_entry(folder / "draft" / "ids.bin")))
    columns = max(1, len(ids))
    edit(folder, "draft", "padded_vocab_size", value=columns)
    for name, signature in signatures(STATES, CAPACITY, columns).items():
        edit(folder, "draft", "signatures", name, value=to_plain(signature))


def test_a_reduced_vocabulary_maps_columns_to_tokens(folder):
    cut(folder, (0, 7, 8, 49))
    bundle = Bundle.read(folder)
    assert bundle.ids_of(bundle.draft) == (0, 7, 8, 49)
    assert bundle.ids_of(bundle.target) is None
    assert (bundle.draft.vocab_size, bundle.draft.padded_vocab_size) == (50, 4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0, 7, 7), "ascend"),
        ((8, 7), "ascend"),
        ((-1, 7), "not all between 0 and 49"),
        ((0, 50), "not all between 0 and 49"),
        ((), "models.draft.token_ids has 0 bytes, 1 columns need 4"),
        (range(51), "draft.padded_vocab_size 51 is above draft.vocab_size 50"),
    ],
)
def test_invalid_token_ids_are_refused(folder, ids, message):
    cut(folder, ids)
    with pytest.raises(BundleError, match=message):
        Bundle.read(folder)


def test_a_damaged_file_of_token_ids_is_refused(folder):
    cut(folder, (0, 7, 8))
    (folder / "draft" / "ids.bin").write_bytes(struct.pack("<3i", 0, 7, 9))
    with pytest.raises(BundleError, match="SHA-256"):
        Bundle.read(folder)


def test_writing_is_repeatable(folder):
    text = (folder / MANIFEST).read_text("utf-8")
    assert Bundle.from_json(text).to_json() == text


MAPS = ("files", "versions", "special_tokens", "signatures")
STATE = ("target", "states", 0)
INPUT = ("target", "signatures", "chosen_logits", "inputs", 3)
OUTPUT = ("target", "signatures", "chosen_logits", "outputs", 0)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("surprise",), 1, "key 'surprise' is unknown"),
        (("target", "surprise"), 1, "key 'models.target.surprise' is unknown"),
        (("target", "states"), [], "must have at least one state"),
        (("target", "states"), [{"name": "0.key"}], r"'models.target.states\[0\].dtype'"),
        (
            (*STATE, "kind"),
            "recurrent",
            "state 0.key: kind must be rows, constant, got 'recurrent'",
        ),
        ((*STATE, "name"), "0.value", "states must not repeat a name"),
        ((*STATE, "name"), "0.Key", "a state's name must be up to 90 of"),
        ((*STATE, "name"), "9.key", "target/decoder.onnx: its signature does not match its states"),
        ((*STATE, "dtype"), "float16", "all of them one dtype"),
        ((*STATE, "shape"), [2, "S", 4], "state 0.key: shape must be B, a number, S and"),
        ((*STATE, "shape"), ["B", 2, 4, "S"], "0.key: shape must be B, a number, S and"),
        ((*STATE, "shape"), ["B", 2, "S", "T"], "state 0.key: sizes must be at least 1"),
        (
            (*STATE, "shape"),
            ["B", 3, "S", 4],
            "past_key_values.0.key is 0.key, float32 .*, expected 0.key, float32 .*3, 40, 4",
        ),
        ((*INPUT, "state"), "0.value", "states must be unique among inputs"),
        ((*INPUT, "state"), "3.key", "past_key_values.0.key is 3.key, .* expected 0.key,"),
        ((*INPUT, "shape"), ["B", 2, 41, 4], "past_key_values.0.key is 0.key, .*41.*, expected "),
        ((*OUTPUT[:-1], 1, "state"), "0.value", "present.0.key is 0.value, .*, expected 0.key"),
        (("target", "vocab_size"), "50", "key 'models.target.vocab_size' must be an integer"),
        (("target", "vocab_size"), 50.0, "key 'models.target.vocab_size' must be an integer"),
        (("target", "vocab_size"), True, "key 'models.target.vocab_size' must be an integer"),
        (("target", "vocab_size"), 49, "draft.vocab_size 50 is above target.vocab_size 49"),
        (("target", "weights"), "target/other.bin", "which is not among the files"),
        (("target", "context_length"), 38, r"target.capacity 40 is below 43"),
        (("end_tokens",), [50], "end_tokens has 50"),
        (("num_draft_tokens",), 0, "num_draft_tokens must be between 1 and 64"),
        (("default_sampling", "temperature"), -1, "temperature must be at least 0"),
        (("files", "tokenizer.json", "sha256"), "00", "64 lowercase"),
        (("target", "context_length"), 0, "context_length must be at least 1"),
        (("target", "graphs", 0, "ops"), "tensorrt", "ops must be one of onnx, gqa"),
        (("target", "graphs"), [], "must have a decoder"),
        (
            ("target", "graphs", 0, "length"),
            5,
            "decoder, batched, scored, unrolled, sampled, encoder, open, features, fuse must",
        ),
        (("target", "graphs", 1, "signature"), "gone", "verify has no 'gone' among signatures"),
        (("target", "graphs", 1, "name"), "Verify", "name must be up to 40 of"),
        (
            ("target", "graphs", 1, "name"),
            "prefill",
            "its signature does not match its states and logits",
        ),
        (
            ("target", "graphs", 0, "signature"),
            "caches_alone",
            "decoder.onnx: its signature does not match",
        ),
        ((*OUTPUT, "dtype"), "float16", "logits is logits, float16 .*, expected logits, float32"),
        (
            (*OUTPUT, "shape"),
            ["B", "X", 64],
            "a dimension must be at least 1 or one of B, T, R, N, K, L, got 'X'",
        ),
        (
            (*OUTPUT, "shape"),
            ["B", 0, 64],
            "a dimension must be at least 1 or one of B, T, R, N, K, L, got 0",
        ),
        ((*OUTPUT, "shape"), ["B", "T", 6.5], "must be an integer, got 6.5"),
        ((*OUTPUT, "role"), "state", "ports with role state must name it, and no others"),
        ((*OUTPUT, "role"), "Logits", "a role must be up to 40 of"),
        ((*OUTPUT, "name"), "present.0.key", "names must be unique"),
        ((*OUTPUT, "name"), "a\nb", "1 to 100 printable characters"),
        (
            ("draft", "token_ids"),
            "ids.bin",
            "models.draft.token_ids 'ids.bin' is not among the files",
        ),
        (("draft", "token_ids"), "tokenizer.json", "token_ids has 20 bytes, 64 columns need 256"),
        (("target", "token_ids"), "tokenizer.json", "models.target.token_ids must be null"),
        (("models",), {}, "models must have target, and may have draft"),
        (("target", "vocab_size"), 65, "target.vocab_size 65 is above its 64 columns"),
        (("draft", "vocab_size"), 0, "vocab_size and padded_vocab_size must be at least 1"),
        (("draft", "weights_dtype"), "float8", "got 'float8'"),
        (("num_draft_tokens",), 3, "verify must have length 4"),
        (("target", "parity", "onnx", "logits_error"), -1.0, "logits_error must be at least 0"),
        (("target", "parity", "onnx", "error_ratio"), 17.0, "error_ratio must be at most 16"),
        (("target", "parity", "onnx", "num_positions"), -1, "num_positions must be at least 0"),
        (("draft", "num_parameters"), -1, "num_parameters and num_experts must be at least 0"),
        (
            ("draft", "parity", "onnx", "logits_std"),
            10**400,
            "key 'models.draft.parity.onnx.logits_std'",
        ),
        (("tokenizer",), "gone.json", "'gone.json' is not among the files"),
    ],
)
def test_invalid_value_error_names_the_key(folder, keys, value, message):
    edit(folder, *keys, value=value)
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.read(folder)
    assert MANIFEST in str(caught.value)
    assert "export or copy the bundle again" in str(caught.value)


@pytest.mark.parametrize("role", ["hidden", "logits"])
def test_duplicate_role_among_the_outputs_of_a_graph_is_refused(folder, role):
    signature = json.loads((folder / MANIFEST).read_text("utf-8"))["models"]
    for key in OUTPUT[:-1]:
        signature = signature[key]
    extra = {"role": role, "state": None, "dtype": "float32", "shape": ["B", "T", 8]}
    extras = [extra | {"name": name} for name in ("first", "second")]
    edit(folder, *OUTPUT[:-1], value=[*signature, *extras])
    with pytest.raises(BundleError, match=f"role '{role}' appears twice among") as caught:
        Bundle.read(folder)
    assert "\n" not in str(caught.value)


def test_two_outputs_of_a_state_are_refused(folder):
    models = json.loads((folder / MANIFEST).read_text("utf-8"))["models"]
    outputs = models["target"]["signatures"]["chosen_logits"]["outputs"]
    edit(folder, *OUTPUT[:-1], value=[*outputs, outputs[1] | {"name": "again"}])
    with pytest.raises(BundleError, match=r"again is 0\.key, .*, expected no such port"):
        Bundle.read(folder)


@pytest.mark.parametrize(
    ("found", "cure"), [(8, "export the bundle again"), (FORMAT + 1, "upgrade specedge")]
)
def test_unsupported_format_is_rejected_with_a_remedy(folder, found, cure):
    edit(folder, "format", value=found)
    with pytest.raises(BundleError) as caught:
        Bundle.read(folder)
    said = f"format is {found}, this version of specedge reads 9 and {FORMAT}; {cure}"
    assert str(caught.value) == f"{folder / MANIFEST}: {said}"


def test_error_lists_every_missing_key(folder):
    whole = (folder / MANIFEST).read_text("utf-8")

    def paths(value, before=()):
        for key in value:
            yield (*before, key)
            if isinstance(value[key], dict) and key not in MAPS:
                yield from paths(value[key], (*before, key))

    for keys in {*paths(json.loads(whole))} - {("models", "draft")}:
        (folder / MANIFEST).write_text(whole, "utf-8")
        edit(folder, *keys, drop=True)
        with pytest.raises(BundleError, match="missing" if keys != ("format",) else "format"):
            Bundle.read(folder)


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/passwd", "a/../../b", "a//b", "./a", "a\\b", "C:/a", "a/", "", "..", "é"],
)
def test_path_traversal_is_rejected(folder, name):
    entry = {"size": 0, "sha256": "0" * 64}
    edit(folder, "files", name, value=entry)
    with pytest.raises(BundleError, match="not a plain path inside the bundle"):
        Bundle.read(folder)


def test_repeated_keys_and_nan_are_errors(folder):
    text = (folder / MANIFEST).read_text("utf-8")
    (folder / MANIFEST).write_text(text.replace("{", '{"format": 2,', 1), "utf-8")
    with pytest.raises(BundleError, match="key 'format' appears twice"):
        Bundle.read(folder)
    (folder / MANIFEST).write_text(text.replace("3.0", "NaN", 1), "utf-8")
    with pytest.raises(BundleError, match="NaN"):
        Bundle.read(folder)


def test_missing_folder_or_manifest_is_reported(tmp_path):
    with pytest.raises(BundleError, match="folder does not exist"):
        Bundle.read(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"has no bundle\.json"):
        Bundle.read(tmp_path)


@pytest.mark.parametrize("name", ["target/weights.bin", "tokenizer.json"])
def test_a_truncated_or_missing_file_is_found_when_reading(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(BundleError, match=f"{name}: has .* bytes, bundle.json lists"):
        Bundle.read(folder)
    (folder / name).unlink()
    with pytest.raises(BundleError, match=name):
        Bundle.read(folder)


def test_a_wrong_checksum_of_a_small_file_is_found_when_reading(folder):
    (folder / "tokenizer.json").write_bytes(b"x" * 20)
    with pytest.raises(BundleError, match="SHA-256"):
        Bundle.read(folder)


@pytest.mark.parametrize(
    ("role", "rates", "said"),
    [
        ("target", {"greedy": 0.5, "sampled": 0.5}, "acceptance is a key of the draft"),
        ("draft", {"greedy": 1.5, "sampled": 0.5}, "between 0 and 1"),
        ("draft", {"greedy": 0.5}, "sampled' is missing"),
        (
            "draft",
            {"greedy": 0.5, "sampled": 0.5, "greedy_by_confidence": [0.5]},
            "7 rates or none",
        ),
        (
            "draft",
            {"greedy": 0.5, "sampled": 0.5, "sampled_by_confidence": [0.5] * 6 + [1.5]},
            "rates by confidence must be between 0 and 1",
        ),
    ],
)
def test_acceptance_rates_are_checked(folder, role, rates, said):
    edit(folder, role, "acceptance", value=rates)
    with pytest.raises(BundleError, match=said):
        Bundle.read(folder)


def format_9(manifest):
    """Return a manifest as format 9 has it."""

    def port(entry):
        role = "cache" if entry["state"] else entry["role"]
        names = {"name": entry["name"], "role": role, "buffer": entry["state"]}
        return names | {"dtype": entry["dtype"], "shape": entry["shape"]}

    def model(entry):
        keys, values = entry["states"][::2], entry["states"][1::2]
        layers = [
            {"heads": key["shape"][1], "key_size": key["shape"][3], "value_size": value["shape"][3]}
            for key, value in zip(keys, values, strict=True)
        ]
        cache = {"dtype": keys[0]["dtype"], "capacity": entry["capacity"], "layers": layers}
        source = {("licence" if k == "license" else k): v for k, v in entry["source"].items()}
        parity = {
            ops: {("row_independent_lengths" if k == "invariant_lengths" else k): v
                  for k, v in report.items()}
            for ops, report in entry["parity"].items()
        }  # fmt: skip
        signatures = {
            name: {end: [port(p) for p in ports] for end, ports in signature.items()}
            for name, signature in entry["signatures"].items()
        }
        graphs = [graph | {"batch": 1} for graph in entry["graphs"]]
        kept = {
            name: value
            for name, value in entry.items()
            if name not in ("capacity", "states", "token_ids", "quantization")
        }
        return kept | {
            "source": source, "cache": cache, "signatures": signatures, "graphs": graphs,
            "parity": parity, "quantisation": entry["quantization"],
        }  # fmt: skip

    models = manifest.pop("models")
    draft = models.get("draft")
    return manifest | {
        "format": 9,
        "target": model(models["target"]),
        "draft": draft and model(draft),
        "id_map": draft and draft["token_ids"],
    }


@pytest.mark.parametrize("has_draft", [True, False])
def test_a_bundle_of_format_9_is_read_as_format_10(has_draft):
    embedded = Bundle.read(store.embedded_folder())
    models = embedded.models if has_draft else {"target": embedded.target}
    bundle = dataclasses.replace(embedded, models=models)
    assert Bundle.from_json(json.dumps(format_9(json.loads(bundle.to_json())))) == bundle


def test_reduced_vocabularies_of_format_9_are_read(folder):
    cut(folder, (0, 7, 8, 49))
    manifest = format_9(json.loads((folder / MANIFEST).read_text("utf-8")))
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    bundle = Bundle.read(folder)
    assert bundle.ids_of(bundle.draft) == (0, 7, 8, 49)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("format",), 9.0, "format must be 10"),
        (("target",), None, "a part of format 9 has another type"),
        (("target", "cache"), [], "a part of format 9 has another type"),
        (("target", "cache", "layers"), 3, "a part of format 9 has another type"),
        (("target", "cache", "surprise"), 3, "key 'surprise' of a model is unknown"),
        (("target", "capacity"), 40, "key 'capacity' of a model is unknown"),
        (("target", "quantization"), {}, "key 'quantization' of a model is unknown"),
        (("target", "graphs"), [1], "a part of format 9 has another type"),
        (("target", "graphs", 0, "batch"), 3, "key 'batch' of a graph must be 1"),
        (("draft", "signatures", "with_logits"), {"inputs": [{}]}, "key 'role' is missing"),
        (("models",), {}, "format 9 has no key 'models'"),
        (("id_map",), 5, "token_ids' must be a string"),
    ],
)
def test_damaged_manifests_of_format_9_are_refused(folder, keys, value, message):
    manifest = inner = format_9(json.loads((folder / MANIFEST).read_text("utf-8")))
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(BundleError, match=message) as caught:
        Bundle.read(folder)
    assert "\n" not in str(caught.value)
    assert "export or copy the bundle again" in str(caught.value)


def test_the_target_comes_first_whatever_the_order_of_keys(folder):
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    manifest["models"] = dict(reversed(manifest["models"].items()))
    bundle = Bundle.from_json(json.dumps(manifest))
    assert list(bundle.models) == ["target", "draft"]


def test_layers_do_not_depend_on_the_order_of_states(folder):
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    for model in manifest["models"].values():
        model["states"].sort(key=lambda state: state["name"].rpartition(".")[2])
    assert len(Bundle.from_json(json.dumps(manifest)).target.layers) == 2
