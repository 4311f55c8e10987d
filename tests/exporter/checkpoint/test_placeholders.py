"""Large matrices stay in the checkpoint, and the model computes as if they were in memory."""

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config

from cases import exhaustive, slow
from checkpoints import make_config, make_model, make_tokenizer, save
from specedge.bundle import Bundle
from specedge.bundle.integrity import file_entry
from specedge.exporter import Progress, export
from specedge.exporter.checkpoint import checkpoints, loader, placeholders
from specedge.exporter.checkpoint.lazy_tensors import lazy_rows
from specedge.exporter.checkpoint.placeholders import WeightSources
from specedge.exporter.checkpoint.quantized_tensors import QuantizedTensor
from specedge.exporter.tracing import geometry, tracer
from specedge.exporter.verification.exact_model import exact_arithmetic

HIDDEN = 576  # every matrix of a layer is 1 MiB or more in float32
TOKENS = torch.arange(12)[None]


def gemma2():
    return Gemma2Config(
        vocab_size=512, hidden_size=HIDDEN, intermediate_size=1024, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, head_dim=72, max_position_embeddings=64,
        bos_token_id=0, eos_token_id=0, sliding_window=16,
    )  # fmt: skip


def make(folder, kind, dtype):
    if kind == "gemma2":
        config = gemma2()
    else:
        tied = kind != "llama"
        config = make_config(
            kind, hidden=HIDDEN, heads=8, layers=1, context=64, tied=tied, scale=0.07
        )
    return save(make_model(config).to(dtype), make_tokenizer(folder / "tokenizer"), folder / kind)


def load(folder):
    return loader.load(checkpoints.find("target", str(folder), None), Progress())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *map(exhaustive, (torch.float32, torch.float16))]
)
@pytest.mark.parametrize("kind", ["gpt2", "llama", *map(exhaustive, ("qwen2", "gemma2"))])
def test_materialized_model_is_bitwise_equal_to_loaded_model(kind, dtype, tmp_path):
    folder = make(tmp_path, kind, dtype)
    loaded = load(folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.equal(loaded.model(TOKENS).logits, whole(TOKENS).logits)
    assert loaded.dtype == str(dtype).removeprefix("torch.")
    large = {n for n, p in whole.named_parameters() if p.ndim == 2 and p.nbytes >= 1 << 20}
    stood_in = {
        n for n, p in loaded.model.named_parameters() if loaded.sources.stored_matrix(p) is not None
    }
    assert large == stood_in
    assert len(large) > 4


@pytest.mark.parametrize("kind", ["gpt2", *map(exhaustive, ("llama", "gemma2"))])
def test_geometry_is_measured_without_reading_matrices(kind, tmp_path):
    loaded = load(make(tmp_path, kind, torch.bfloat16))
    seen = []
    for unread in (False, True):
        with loaded.sources.materialized(loaded.model, only_shapes=unread):
            shape = geometry.measure_geometry(loaded.model, 64, 4)
            seen.append((shape, tracer.observe(loaded.model, shape)))
            with torch.no_grad():
                assert (loaded.model(TOKENS).logits == 0).all() == unread
    assert seen[0] == seen[1]
    assert all("forward" not in vars(module) for module in loaded.model.modules())


def test_quantized_embedding_is_dequantized_by_row_and_head_once(monkeypatch):
    monkeypatch.setattr(placeholders, "HUGE", 0)
    values = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)
    num_rows = []

    def dequantize(at):
        num_rows.append(len(values[at]))
        return values[at]

    tensor = QuantizedTensor("table", "Q8_0", values.shape, 0, None, dequantize, None)
    model = torch.nn.Sequential(torch.nn.Embedding(300, 64), torch.nn.Linear(64, 300, bias=False))
    sources = WeightSources()
    for module in model:
        module.weight = sources.parameter(lazy_rows(tensor))
    tokens, table = torch.tensor([[3, 299, 3]]), torch.from_numpy(values)
    for dtype in (torch.float32, torch.float64):
        with sources.materialized(model, dtype), torch.no_grad():
            expected = table.to(dtype)[tokens] @ table.to(dtype).T
            torch.testing.assert_close(model(tokens), expected)
    assert sum(num_rows) == 3 + 3 + 300


@pytest.mark.parametrize("kind", ["gpt2", *map(exhaustive, ("llama", "qwen2"))])
def test_huge_vocabulary_is_cast_in_chunks(kind, tmp_path, monkeypatch):
    loaded = load(make(tmp_path, kind, torch.bfloat16))
    results = []
    for huge in (placeholders.HUGE, 1 << 17):
        monkeypatch.setattr(placeholders, "HUGE", huge)
        reading = loaded.sources.materialized(loaded.model, torch.float64)
        with torch.no_grad(), exact_arithmetic(loaded.model), reading:
            results.append(loaded.model(TOKENS).logits)
    assert results[0].dtype == torch.float64
    assert torch.isfinite(results[1]).all()
    assert torch.allclose(results[0], results[1], rtol=1e-12, atol=1e-12)
    assert "forward" not in vars(loaded.model.get_output_embeddings())


def test_computing_with_a_placeholder_gives_nan(tmp_path):
    loaded = load(make(tmp_path, "llama", torch.bfloat16))
    with torch.no_grad():
        assert torch.isnan(loaded.model(TOKENS).logits).all()
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.isfinite(loaded.model(TOKENS).logits).all()
    assert torch.isnan(loaded.model.lm_head.weight).all()


def test_placeholders_use_no_memory():
    sources = placeholders.WeightSources()
    stored = torch.randn(600, 600)
    parameter = sources.parameter(stored)
    assert parameter.shape == stored.shape
    assert parameter.untyped_storage().nbytes() < stored.nbytes / 50
    assert sources.stored_matrix(parameter) is stored
    small = torch.randn(4, 4)
    assert torch.equal(sources.parameter(small), small)


def test_view_of_placeholder_is_placeholder_of_view():
    sources = placeholders.WeightSources()
    stored = torch.randn(4, 512, 600)
    view = sources.view(sources.parameter(stored), lambda x: x.transpose(1, 2))
    assert view.isnan().all()
    assert torch.equal(sources.stored_matrix(view), stored.transpose(1, 2))
    plain = torch.randn(600, 600)
    assert torch.equal(sources.view(plain, lambda x: x.T), plain.T)


@pytest.fixture(scope="module", params=["gpt2", slow("llama")])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    target = make(folder, request.param, torch.bfloat16)
    progress = Progress()
    bundle = export(None, target, folder / "bundle", progress=progress, ops="onnx")
    for note in progress.notes:
        assert "states no license" in note or "texts end at" in note
    return target, bundle, progress


def is_in(matrix, array):
    """Return True for an array that is a matrix, or joins its transpose with others."""
    if np.array_equal(matrix, array):
        return True
    starts = range(array.shape[1] - len(matrix) + 1) if len(array) == matrix.shape[1] else ()
    return any(
        np.array_equal(matrix[0], array[:, i])
        and np.array_equal(matrix.T, array[:, i : i + len(matrix)])
        for i in starts
    )


def test_matrices_are_stored_once_and_bitwise_unchanged(exported):
    target, bundle, _ = exported
    model = onnx.load(bundle.path("target/decoder.onnx"))
    stored = [
        onnx.numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in model.graph.initializer
        if len(tensor.dims) == 2
    ]
    with safe_open(target / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            matrix = file.get_tensor(key).float()
            if matrix.ndim == 2 and matrix.numel() >= 1 << 18:
                assert any(is_in(matrix.numpy(), array) for array in stored), key
    size = sum(p.stat().st_size for p in target.glob("*.safetensors"))
    assert abs(bundle.files["target/weights.bin"].size - size) < 0.1 * size


def test_streaming_hash_equals_hash_of_weights_file(exported):
    _, bundle, _ = exported
    name = "target/weights.bin"
    assert bundle.files[name] == file_entry(bundle.path(name))
    assert Bundle.read(bundle.folder) == bundle


@pytest.mark.slow(exhaustive=True)
def test_mixed_types_are_lossless(tmp_path):
    folder = make(tmp_path, "llama", torch.bfloat16)
    state = load_file(folder / "model.safetensors")
    exact, inexact = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    state[exact] = state[exact].float()
    state[inexact] = 0.05 * torch.randn(state[inexact].shape)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    bundle = export(folder, folder, tmp_path / "bundle", ops="onnx")
    assert bundle.target.weights_dtype == "bfloat16"
    model = onnx.load(bundle.path("target/decoder.onnx"))
    kinds = {
        onnx.numpy_helper.to_array(t).astype(np.float32).tobytes(): t.data_type
        for t in model.graph.initializer
    }
    wanted = {exact: onnx.TensorProto.BFLOAT16, inexact: onnx.TensorProto.FLOAT}
    for name, kind in wanted.items():
        assert kinds[state[name].float().T.numpy().tobytes()] == kind


def test_float64_weights_are_converted_to_float32_with_note(tmp_path):
    folder = make(tmp_path, "llama", torch.float64)
    progress = Progress()
    loaded = loader.load(checkpoints.find("target", str(folder), None), progress)
    assert loaded.dtype == "float32"
    assert progress.notes == ["target: its float64 weights are converted to float32"]


def test_duplicate_output_matrix_is_tied(tmp_path):
    folder = make(tmp_path, "llama", torch.bfloat16)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    loaded = load(folder)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
