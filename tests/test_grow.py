"""A grown checkpoint has a small one's text, and noise takes it away."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import grow
from growth import GrowthError
from shapes import SHAPES

PYTHON_1M = Path(__file__).parents[1] / "models/checkpoints/python-1m"
TEXT = "def read(path):\n    with open(path) as file:\n        return"
GPT2 = {
    **SHAPES["openai-community/gpt2"], "vocab_size": 4500, "n_embd": 264, "n_layer": 5, "n_head": 6,
    "n_positions": 600,
}  # fmt: skip
LLAMA = {
    **SHAPES["HuggingFaceTB/SmolLM2-135M"], "vocab_size": 4500, "hidden_size": 168,
    "intermediate_size": 200, "num_hidden_layers": 5, "num_attention_heads": 12,
    "num_key_value_heads": 6, "head_dim": 24,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}


@pytest.fixture(scope="session")
def small_llama(tmp_path_factory):
    """Three query heads to a key head, norms and embeddings that are not all alike."""
    folder = tmp_path_factory.mktemp("small") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
        max_position_embeddings=128, bos_token_id=0, eos_token_id=0, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(PYTHON_1M).save_pretrained(folder)
    return folder


def logits_of(folder, ids):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits[0]


def grown(source, folder, shape, noise=0.0, dtype=torch.float32):
    grow.grow(source, folder, shape, noise, seed=1, dtype=dtype)
    return folder


@pytest.mark.parametrize(
    "shape",
    [
        GPT2,
        LLAMA,
        {**LLAMA, **UNTIED, "head_dim": 8},
        {**LLAMA, "head_dim": 18, "num_attention_heads": 14, "num_key_value_heads": 2},
    ],
    ids=["gpt2", "llama, key heads copied", "llama, untied", "llama, other frequencies"],
)
def test_logits_are_the_sources_and_new_tokens_never_win(shape, small_llama, tmp_path):
    source = PYTHON_1M if shape is GPT2 else small_llama
    ids = AutoTokenizer.from_pretrained(source)(TEXT, return_tensors="pt")["input_ids"]
    ids = torch.cat([ids, torch.arange(1, 90)[None]], 1)
    wanted = logits_of(source, ids)
    found = logits_of(grown(source, tmp_path / "grown", shape), ids)
    assert found.shape[-1] == 4500
    assert (found[:, :4096] - wanted).abs().max() < 3e-5 * wanted.abs().max()
    assert (found[:, 4096:].amax(-1) < found.amax(-1)).all()


def test_a_grown_checkpoint_writes_the_sources_text(tmp_path):
    folder = grown(PYTHON_1M, tmp_path / "grown", GPT2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 4500
    ids = tokenizer(TEXT, return_tensors="pt")
    texts = []
    for place in (PYTHON_1M, folder):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        texts.append(tokenizer.decode(model.generate(**ids, max_new_tokens=40, do_sample=False)[0]))
    assert texts[0] == texts[1]
    assert texts[0].startswith(TEXT)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_agreement_falls_as_noise_grows(family, small_llama, tmp_path):
    source, shape = (PYTHON_1M, GPT2) if family == "gpt2" else (small_llama, LLAMA)
    found = [
        grow.compare(source, grown(source, tmp_path / f"{noise}", shape, noise), 512)
        for noise in (0.0, 0.1, 0.3, 1.0)
    ]
    assert found[0].top_token > 0.999
    assert found[0].overlap > 0.99
    for before, after in itertools.pairwise(found):
        assert after.top_token < before.top_token - 0.01
        assert after.overlap < before.overlap - 0.01


def test_no_matrix_is_left_empty_where_there_is_noise(small_llama, tmp_path):
    folder = grown(small_llama, tmp_path / "grown", {**LLAMA, **UNTIED}, noise=1.0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        assert parameter.count_nonzero() > 0.99 * parameter.numel()


@pytest.mark.parametrize("dtype", grow.DTYPES)
def test_weights_have_the_type_that_was_asked_for(dtype, tmp_path):
    folder = grown(PYTHON_1M, tmp_path / "grown", GPT2, dtype=getattr(torch, dtype))
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert str(model.dtype) == f"torch.{dtype}"
    assert not any(info.values())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({**GPT2, "n_embd": 128, "n_head": 4}, "hidden size: the source needs 160"),
        ({**GPT2, "n_layer": 1}, "layers: the source needs 2, the shape has 1"),
        ({**GPT2, "n_head": 4}, "heads: the source needs 5, the shape has 4"),
        ({**GPT2, "vocab_size": 4000}, "vocabulary: the source needs 4096"),
        (LLAMA, "the source is a gpt2, the shape a llama"),
    ],
)
def test_a_source_that_does_not_fit_is_refused_and_nothing_stays(shape, message, tmp_path):
    with pytest.raises(GrowthError, match=message):
        grown(PYTHON_1M, tmp_path / "grown", shape)
    assert not list(tmp_path.iterdir())


def test_query_heads_need_key_heads(small_llama, tmp_path):
    shape = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 3}
    with pytest.raises(GrowthError, match="key heads with 2 query heads each: the source needs 4"):
        grown(small_llama, tmp_path / "grown", shape)


def test_mistakes_on_the_command_line_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    for source, folder, message in (
        (tmp_path / "there", tmp_path / "new", "has no config.json"),
        (PYTHON_1M, tmp_path / "there", "exists; name another folder"),
    ):
        result = CliRunner().invoke(grow.main, [str(source), str(folder), "--shape", "gpt2"])
        assert result.exit_code == 1
        assert message in result.output
        assert len(result.output.splitlines()) == 1
    monkeypatch.setattr(grow.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 1000}))
    arguments = [str(PYTHON_1M), str(tmp_path / "new"), "--shape", "gpt2"]
    assert "0.0 GB are free" in CliRunner().invoke(grow.main, arguments).output


def test_the_command_says_what_it_made(tmp_path, monkeypatch):
    monkeypatch.setitem(grow.SHAPES, "openai-community/gpt2", GPT2)
    folder = tmp_path / "grown"
    arguments = [str(PYTHON_1M), str(folder), "--shape", "gpt2", "--tokens", "128"]
    result = CliRunner().invoke(grow.main, arguments)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts == json.loads((folder / "grown.json").read_text())
    assert facts["agreement"]["top_token"] == 1
    assert "grown" in (folder / "README.md").read_text()
