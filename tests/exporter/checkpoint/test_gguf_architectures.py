"""GGUF architectures with a table of our own, by headers that llama.cpp's converter wrote."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from formats import stored_numbers
from gguf import GGUFValueType
from transformers import CONFIG_MAPPING

from checkpoints import make_model
from ggufs import interleave_halves
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, loader

# Made with llama.cpp's convert_hf_to_gguf.py from random models of these configs; llama.cpp's
# logits of the converted files were those of the loaded models.
FILES = json.loads(Path(__file__).with_name("gguf_architectures.json").read_text("utf-8"))
INTERLEAVED = {"arcee", "granite", "olmo", "smollm3"}
TYPES = {
    bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}  # fmt: skip


def converted(architecture, name, array, config):
    """Return an array as llama.cpp's converter writes it."""
    if architecture in INTERLEAVED and (match := re.search(r"\.([qk])_proj\.", name)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        return interleave_halves(array, heads)
    if architecture == "gptneox" and "query_key_value" in name:
        heads = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1).reshape(array.shape))
    return array + 1 if architecture == "gemma" and "norm" in name else array


def write_file(path, file, model):
    """Write a model as a GGUF file with a recorded header."""
    architecture = file["architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in file["header"].items():
        element = value[0] if isinstance(value, list) else value
        types = [TYPES[type(element)]]
        types = [GGUFValueType.ARRAY, *types] if isinstance(value, list) else types
        writer.add_key_value(f"{architecture}.{key}", value, *types)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(model.config.vocab_size)])
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, file["header"]["block_count"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem = names.get_name(name.rpartition(".")[0])
        array = converted(architecture, name, tensor.numpy(), model.config)
        writer.add_tensor(f"{stem}.{name.rpartition('.')[2]}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", FILES)
def test_file_of_an_architecture_is_read_as_its_original(family, tmp_path):
    file, path = FILES[family], tmp_path / "model.gguf"
    model = make_model(CONFIG_MAPPING[file["model_type"]](pad_token_id=None, **file["config"]))
    write_file(path, file, model)
    progress = Progress()
    loaded = loader.load(checkpoints.find("target", str(path), None), progress)
    assert not progress.notes
    expected, state = dict(model.named_parameters()), stored_numbers(loaded)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=1e-6), name
    tokens = torch.arange(32)[None]
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.allclose(loaded.model(tokens).logits, model(tokens).logits, atol=1e-4)
