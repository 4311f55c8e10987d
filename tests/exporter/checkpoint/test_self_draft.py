"""A draft of the target's own first layers, out of the target's weights file."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import document_reader
import specedge
from architectures import ARCHITECTURES
from cases import exhaustive
from checkpoints import make_checkpoint, make_config, make_model, make_tokenizer
from specedge import bundle_library
from specedge.bundle import Bundle, store
from specedge.cli.inspect import inspect
from specedge.errors import CheckpointError, ExportError
from specedge.exporter import Progress, export, internals, model_export
from specedge.exporter.checkpoint import self_draft
from specedge.exporter.checkpoint.decoder_layers import layer_list
from specedge.exporter.checkpoint.loader import LoadedCheckpoint
from specedge.exporter.checkpoint.placeholders import WeightSources

CONTEXT, LAYERS = 96, 2
KINDS = {
    "gpt2": {"layers": LAYERS, "context": CONTEXT, "hidden": 256, "scale": 0.1},
    "llama": {"layers": LAYERS, "context": CONTEXT, "kv_heads": 2},
}
PROMPT = list(range(40, 52))


class Made:
    def __init__(self, folder, kind, num_layers):
        self.kind, self.num_layers = kind, num_layers
        tokenizer = make_tokenizer(folder / "tokenizer")
        self.target = make_checkpoint(folder / "target", kind, tokenizer, **KINDS[kind])
        (self.target / "LICENSE").write_text("Do as you like.", "utf-8")
        if kind == "gpt2":  # large matrices are not in memory, and in half precision
            model = AutoModelForCausalLM.from_pretrained(self.target)
            model.to(torch.bfloat16).save_pretrained(self.target)
        self.progress = Progress()
        self.bundle = export(
            f"self:{num_layers}",
            self.target,
            folder / "bundle",
            progress=self.progress,
            ops="all" if kind == "gpt2" else "onnx",
        )
        self.pipeline = specedge.load(self.bundle.folder)


@pytest.fixture(
    scope="module",
    params=[("llama", 1), exhaustive(("gpt2", 1))],
    ids=str,
)
def made(request, tmp_path_factory):
    return Made(tmp_path_factory.mktemp("self"), *request.param)


def places(bundle, model):
    """Return offset, size and type of each tensor of a model in its weights file."""
    found = set()
    for graph in model.graphs:
        proto = onnx.load(bundle.path(graph.file), load_external_data=False)
        for tensor in proto.graph.initializer:
            if where := {entry.key: entry.value for entry in tensor.external_data}:
                assert where["location"] == "weights.bin"
                found.add((where["offset"], where["length"], tensor.data_type))
    return found


def test_self_draft_shares_target_weights_file(made):
    bundle = made.bundle
    assert [n for n in bundle.files if n.endswith(".bin")] == ["target/weights.bin"]
    assert bundle.draft.weights == bundle.target.weights
    assert places(bundle, bundle.draft) < places(bundle, bundle.target)
    itemsize = {"bfloat16": 2, "float32": 4}[bundle.target.weights_dtype]
    tables = 2 * 2 * CONTEXT * 64
    assert bundle.files["target/weights.bin"].size < (
        1.02 * bundle.target.num_parameters * itemsize + tables
    )


def test_both_models_agree_with_pytorch_in_every_graph_variant(made):
    """The export verifies numerical parity itself; check that nothing was skipped or noted."""
    for model, layers in ((made.bundle.target, LAYERS), (made.bundle.draft, made.num_layers)):
        assert len(model.layers) == layers
        assert list(model.parity) == (["onnx", "gqa"] if made.kind == "gpt2" else ["onnx"])
        assert all(found.num_positions == CONTEXT for found in model.parity.values())
    assert not [n for n in made.progress.notes if "license" in n or "no gqa" in n]


def test_self_draft_logits_are_early_exit_logits(made):
    model = AutoModelForCausalLM.from_pretrained(made.target, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
        norm = getattr(model.base_model, "ln_f", None) or model.base_model.norm
        wanted = model.lm_head(norm(hidden[made.num_layers]))[0].numpy()
    made.pipeline.draft.truncate(0)
    found = made.pipeline.draft.forward(PROMPT).array().copy()
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_tokens_equal_plain_decoding_to_last_position(made, k):
    plain = made.pipeline.generate(PROMPT, CONTEXT, num_draft_tokens=0, ignore_eos=True)
    one = made.pipeline.generate(PROMPT, CONTEXT, num_draft_tokens=k, ignore_eos=True)
    assert one.tokens == plain.tokens
    assert len(one.tokens) == CONTEXT - len(PROMPT)
    assert one.stats.num_drafted >= len(one.rounds) - 1  # the last may need no draft


def test_drafted_token_follows_targets_distribution(made):
    """Counts of the six likeliest tokens and of all others, over 200 seeds."""
    made.pipeline.target.truncate(0)
    row = np.array(made.pipeline.target.forward(PROMPT)[-1].array(), np.float64)
    distribution = np.exp((row - row.max()) / 2)
    distribution /= distribution.sum()
    draws, top = 200, np.argsort(-distribution)[:6]
    runs = [
        made.pipeline.generate(PROMPT, 1, 2.0, seed=seed, num_draft_tokens=2, ignore_eos=True)
        for seed in range(draws)
    ]
    counts = np.bincount([one.tokens[0] for one in runs], minlength=len(distribution))[top]
    found = np.array([*counts, draws - counts.sum()])
    chances = np.array([*distribution[top], 1 - distribution[top].sum()])
    assert all(one.stats.num_drafted == 2 for one in runs)  # also beyond the request's end
    assert 0 < sum(one.stats.num_accepted > 0 for one in runs) < draws
    spread = np.sqrt(draws * chances * (1 - chances))
    assert (np.abs(found - draws * chances) < 4 * spread + 1).all()


def test_manifest_records_self_draft_source_and_target_license(made):
    bundle = made.bundle
    assert bundle.draft.source.id == f"target self:{made.num_layers}"
    assert bundle.draft.num_parameters < bundle.target.num_parameters
    assert bundle.license_files("draft") == bundle.license_files("target") == ["target/LICENSE"]
    shown = CliRunner().invoke(inspect, ["--check", "--bundle", str(bundle.folder)])
    assert shown.exit_code == 0, shown.output
    assert "MB (the target's), stored as" in shown.output
    assert shown.output.count("MB (the target's)") == 1


def test_host_written_from_document_runs_self_draft(made):
    folder = made.bundle.folder
    manifest = document_reader.read(folder)
    assert manifest == json.loads(made.bundle.to_json())
    options = document_reader.session_options()
    models = [
        document_reader.Model(folder, manifest["models"][role], "onnx", options, 1e4)
        for role in ("target", "draft")
    ]
    greedy = {"temperature": 0.0}
    found, rounds = document_reader.generate(*models, PROMPT, 20, 4, 1, greedy)
    pipeline = specedge.load(folder, ops="onnx")
    one = pipeline.generate(PROMPT, 20, num_draft_tokens=4, seed=1, ignore_eos=True)
    assert (found, rounds) == (one.tokens, one.stats.num_rounds)


def test_self_draft_bundle_is_listed_and_removed(made, capsys):
    folder = store.bundles_folder() / "own"
    shutil.copytree(made.bundle.folder, folder)
    entry = bundle_library.entries()[0]
    assert entry.error is None
    assert entry.size == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    bundle_library.remove(bundle_library.find_removable("own"))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("self:", "specify self:N"),
        ("self:two", "specify self:N"),
        ("self:-1", "specify self:N"),
        ("self:0", "specify self:N"),
        ("self:2", "has 2 layers, and its draft must have fewer; specify self:1"),
        ("self:99", "has 2 layers"),
    ],
)
def test_invalid_number_of_layers_is_refused(made, tmp_path, draft, said):
    with pytest.raises(CheckpointError, match=said) as caught:
        export(draft, made.target, tmp_path / "bundle")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_revision_of_self_draft_is_rejected(made, tmp_path):
    with pytest.raises(CheckpointError, match="omit --draft-revision"):
        export("self:1", made.target, tmp_path / "bundle", draft_revision="main")


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (1, "has 1 layer, .* specify another --draft"),
        (3, "has 3 layers, and its draft must have fewer; specify self:1 to self:2"),
    ],
)
def test_draft_must_have_fewer_layers(tmp_path, layers, said):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    target = make_checkpoint(tmp_path / "target", "llama", tokenizer, layers=layers)
    with pytest.raises(CheckpointError, match=said):
        export(f"self:{layers}", target, tmp_path / "bundle")


def test_folder_named_like_self_draft_needs_a_path(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made.target, tmp_path / "self:0")
    with pytest.raises(CheckpointError, match=r"\./self:0 for a folder"):
        export("self:0", made.target, tmp_path / "bundle")
    assert self_draft.parse_num_layers("./self:0", None) is None


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_truncated_model_equals_early_exit_of_full_model(name):
    """The truncated model's output is norm and head of the last layer's input, for every family."""
    torch.manual_seed(0)
    model = make_model(ARCHITECTURES[name][1]())
    num_layers = model.config.num_hidden_layers - 1
    twin = self_draft.keep_layers(
        LoadedCheckpoint(model, "float32", WeightSources()), num_layers
    ).model
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        last = layer_list(model)[1][num_layers]
        last.forward = _unchanged(last.forward)
        wanted = model(tokens).logits
        output = twin(tokens, use_cache=True)
    assert torch.equal(output.logits, wanted)
    assert len(output[internals.cache_name(model)].layers) == num_layers
    ours = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for parameter in twin.parameters()} < ours


def _unchanged(forward):
    """Identity layer with the output format of the wrapped layer."""

    def passed(hidden_states, *arguments, **options):
        given = forward(hidden_states, *arguments, **options)
        return (hidden_states, *given[1:]) if isinstance(given, tuple) else hidden_states

    return passed


def test_layers_not_in_a_single_list_are_rejected():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = make_config("llama", layers=2)
            self.a, self.b = (torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 2) for _ in "ab")

    with pytest.raises(ExportError, match="2 module lists instead of one"):
        layer_list(Odd())


def test_truncation_with_unexpected_caches_is_rejected(tmp_path, monkeypatch):
    config = make_config("llama", layers=LAYERS, kv_heads=2, context=CONTEXT)
    loaded = LoadedCheckpoint(make_model(config), "float32", WeightSources())
    part = model_export.measure_model("target", loaded, CONTEXT, 4, 512, tmp_path, Progress())
    assert len(model_export.cut_draft(part, 1, 4).shape.layers) == 1
    monkeypatch.setattr(self_draft, "keep_layers", lambda loaded, num_layers: loaded)
    with pytest.raises(ExportError, match=r"truncated to self:1: .* 2 layers; specify"):
        model_export.cut_draft(part, 1, 4)


def test_model_of_same_bundle_can_be_read_after_move(made, tmp_path):
    moved = shutil.copytree(made.bundle.folder, tmp_path / "moved")
    assert Bundle.read(moved) == made.bundle
    assert specedge.load(moved).generate(PROMPT, 8, ignore_eos=True).tokens
