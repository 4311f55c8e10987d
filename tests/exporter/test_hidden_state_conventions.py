"""Choice of the hidden states that a draft head reads, and checks of its weights."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config

import eagle_heads
import fitted_heads
from cases import slow
from checkpoints import VOCAB_SIZE, make_checkpoint, make_tokenizer
from eagle_heads import NVIDIA, HeadSpec
from mtp_checkpoints import NUM_LAYERS, SIZE, layer_prefix, make_mtp_checkpoint
from quantized import check_greedy
from specedge import load
from specedge.errors import CheckpointError
from specedge.exporter import Progress, bundle_export, export
from specedge.exporter.quantization import texts
from specedge.exporter.quantization.draft_acceptance import first_windows
from specedge.exporter.quantization.hidden_state_conventions import NUM_TOKENS, draft_two
from specedge.exporter.tracing.hidden_states import HiddenStateRecorder

K = 3
PREFIX = layer_prefix("mimo")


def make_target(folder, kind="mimo"):
    make_mtp_checkpoint(folder, kind, vocab_size=VOCAB_SIZE)
    make_tokenizer(folder)
    return folder


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return tensors


def fit_layer(folder, is_normalized):
    """Fit an MTP layer to predict the target's next hidden state from its last one.

    Both are read after the final norm, or before it. The layer is linear.
    """

    def simplify(tensors):
        random = torch.Generator().manual_seed(0)
        tensors["model.norm.weight"] = torch.randn(SIZE, generator=random).exp()
        tensors[f"{PREFIX}final_layernorm.weight"] = tensors["model.norm.weight"].clone()
        for name in ("token_layernorm", "hidden_layernorm"):
            tensors[f"{PREFIX}{name}.weight"] = torch.ones(SIZE)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{PREFIX}{name}.weight"].zero_()

    tensors = change_tensors(folder, simplify)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=Qwen2Config.from_pretrained(folder), dtype=torch.float64
    ).eval()
    encoder = texts.TextEncoder(Tokenizer.from_file(str(folder / "tokenizer.json")), VOCAB_SIZE)
    recorder = HiddenStateRecorder(model, [NUM_LAYERS, NUM_LAYERS + 1])
    inputs, outputs = [], []
    for text in first_windows(encoder, texts.read_source(None).calibration, NUM_TOKENS):
        tokens = torch.from_numpy(text)
        with torch.no_grad(), recorder.recorded():
            model(tokens[None])
        before, after = (states[0] for states in recorder.take())
        embedding = tensors["model.embed_tokens.weight"][tokens].double()
        read = after if is_normalized else before
        inputs.append(torch.cat([normalize(read[:-1]), normalize(embedding[1:])], -1))
        outputs.append(normalize(before[1:]))
    fitted = torch.linalg.lstsq(torch.cat(inputs), torch.cat(outputs)).solution.T.float()
    change_tensors(folder, lambda x: x.update({f"{PREFIX}input_proj.weight": fitted.contiguous()}))


def normalize(rows):
    return rows / rows.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    ("is_normalized", "precision"), [(False, "fp32"), slow(True, "fp32"), slow(False, "int8")]
)
def test_export_keeps_the_convention_with_the_highest_rates(tmp_path, is_normalized, precision):
    target, progress = make_target(tmp_path / "target"), Progress()
    fit_layer(target, is_normalized)
    bundle = export(
        "mtp", target, tmp_path / "bundle", num_draft_tokens=K, ops="onnx", precision=precision,
        progress=progress,
    )  # fmt: skip
    assert (
        bundle.target.hidden.layers == bundle.draft.hidden.layers == (NUM_LAYERS + is_normalized,)
    )
    where = "after" if is_normalized else "before"
    chosen = f"{where} the target's final norm and {where} its own"
    assert any(note.endswith(f"it reads hidden states {chosen}") for note in progress.notes)
    assert not any("ignored" in note for note in progress.notes)
    (rates,) = (note for note in progress.notes if "by the hidden states that it reads" in note)
    pattern = r"(\d+)% and (\d+)% (\w+) the target's final norm and (\w+) its"
    by_convention = {
        (read, returned): (int(first), int(second))
        for first, second, read, returned in re.findall(pattern, rates)
    }
    other = "before" if is_normalized else "after"
    assert len(by_convention) == 4
    assert by_convention[where, where][0] > 1.2 * by_convention[other, where][0]
    assert by_convention[where, where][1] > by_convention[where, other][1]
    check_greedy(load(bundle.folder), "def parse(self):", 24, K)


class ChosenError(Exception):
    """Ends an export when the hidden states are chosen."""


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("layers", [(2, 4, 6), (1, 3, 5)])
def test_ambiguous_layer_ids_are_measured(tmp_path, monkeypatch, layers):
    target, spec = (
        fitted_heads.make_target(tmp_path),
        replace(fitted_heads.SPEC, layer_ids=(1, 3, 5)),
    )
    tensors = fitted_heads.fit_head(target, spec, layers)
    head, progress = eagle_heads.write_head(tmp_path / "head", spec, tensors), Progress()

    def end(job, checkpoint, *args):
        if checkpoint.role == "target":
            assert job.hidden_layers == layers
            raise ChosenError

    monkeypatch.setattr(bundle_export, "_trace_and_verify", end)
    with pytest.raises(ChosenError):
        export(head, target, tmp_path / "bundle", progress=progress)
    (rates,) = (note for note in progress.notes if "by the hidden states that it reads" in note)
    by_layers = {
        tuple(map(int, read.split(", "))): int(first)
        for first, read in re.findall(r"(\d+)% and \d+% at the inputs .*? layers ([\d, ]+),", rates)
    }
    assert list(by_layers) == [(2, 4, 6), (1, 3, 5)]
    assert by_layers.pop(layers) > 1.2 * max(by_layers.values())
    read = ", ".join(map(str, layers))
    assert any(
        f"it reads hidden states at the inputs of the target's layers {read}," in note
        for note in progress.notes
    )


@pytest.mark.parametrize("returned_layer", [1, 2])
@pytest.mark.parametrize("kind", ["mimo", slow("glm4_moe"), slow("deepseek_v3")])
def test_second_draft_tokens_equal_passes_with_a_cache(tmp_path, kind, returned_layer):
    checkpoint = bundle_export.checkpoints.find("target", str(make_target(tmp_path, kind)), None)
    request = bundle_export.ExportRequest("mtp", tmp_path)
    draft = bundle_export._mtp_layer(request, checkpoint)
    loaded = bundle_export.loader.load(draft, Progress())
    tokens = torch.randint(0, VOCAB_SIZE, (1, 7))
    hidden = torch.randn(1, 7, SIZE)
    first, second = draft_two(loaded, returned_layer, tokens, hidden)
    recorder = HiddenStateRecorder(loaded.model, [returned_layer])
    for row in range(5):
        with torch.no_grad(), recorder.recorded(), loaded.sources.materialized(loaded.model):
            output = loaded.model(tokens[:, 1 : row + 2], hidden=hidden[:, : row + 1])
            returned = recorder.take()[0][:, -1:]
            position = torch.tensor([[row + 1]])
            after = loaded.model(
                tokens[:, row + 2 : row + 3], position, cache=output.cache, hidden=returned
            )
        expected = torch.cat((output.logits[0, -1:], after.logits[0]))
        actual = torch.from_numpy(first[row : row + 1]), torch.from_numpy(second[row : row + 1])
        torch.testing.assert_close(torch.cat(actual), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def unexported(monkeypatch):
    """Fail if a model is exported."""

    def export_model(*args, **options):
        raise AssertionError("a model is exported")

    monkeypatch.setattr(bundle_export, "export_model", export_model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["d2t"].add_(1000), "does not map to different tokens below 512"),
        (lambda x: x.pop("d2t"), "has no d2t"),
        (lambda x: x.pop("norm.weight"), "lacks weights, such as model.norm.weight"),
        (lambda x: x.update({"fc.weight": torch.zeros(32, 64)}), r"fc.weight is \[32, 64\]"),
        (lambda x: x.update({"mask_hidden": torch.zeros(1, 96)}), "has mask_hidden, which is no"),
    ],
)
def test_faults_of_heads_show_before_the_target_is_exported(tmp_path, unexported, change, message):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    target = make_checkpoint(
        tmp_path / "target", "llama", tokenizer, layers=6, hidden=32, kv_heads=2
    )
    spec = HeadSpec(NVIDIA, vocab_size=512, columns=100)
    tensors = eagle_heads.head_tensors(spec)
    change(tensors)
    head = eagle_heads.write_head(tmp_path / "head", spec, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        export(head, target, tmp_path / "bundle")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x.pop(f"{PREFIX}mlp.up_proj.weight"),
            f"lacks weights, such as {PREFIX}mlp.up_proj.weight",
        ),
        (
            lambda x: x.update({f"{PREFIX}self_attn.q_proj.bias": torch.zeros(8)}),
            rf"{PREFIX}self_attn.q_proj.bias is \[8\] in its files and \[32\]",
        ),
        (
            lambda x: x.update({f"{PREFIX}self_attn.q_norm.weight": torch.zeros(8)}),
            f"another kind of layer, such as {PREFIX}self_attn.q_norm.weight",
        ),
        (
            lambda x: x.pop(f"{PREFIX}input_proj.weight"),
            f"lacks weights, such as {PREFIX}input_proj.weight",
        ),
    ],
)
def test_faults_of_mtp_layers_show_before_the_target_is_exported(
    tmp_path, unexported, change, message
):
    target = make_target(tmp_path / "target")
    change_tensors(target, change)
    with pytest.raises(CheckpointError, match=message):
        export("mtp", target, tmp_path / "bundle")
