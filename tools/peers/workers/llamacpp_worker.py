"""llama.cpp through llama-cpp-python, with its own quantizer."""

from __future__ import annotations

import ctypes
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as llama
import numpy as np

from serving import FirstToken, cached, serve, size_of

CONTEXT = 1024
BATCH = 512  # tokens of a pass, at most


class LlamaCpp:
    """Files quantized from the published file's dequantized values; float16 caches, the default."""

    def convert(self, source: str, precision: str, cache: str) -> Path:
        whole = cached(cache, source, "llamacpp-F32", lambda folder: _dequantize(source, folder))
        if precision == "F32":
            return whole
        name = f"llamacpp-{precision}"
        return cached(cache, source, name, lambda folder: _quantize(whole, folder, precision))

    def num_bytes(self, model: Path) -> int:
        return size_of(model / "model.gguf")

    def load(self, model: Path, threads: int, float32_cache: bool = False) -> str:
        llama.llama_backend_init()
        path = str(model / "model.gguf").encode()
        self.model = llama.llama_model_load_from_file(path, llama.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp cannot load the file")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, BATCH, BATCH
        params.n_threads = params.n_threads_batch = threads
        if float32_cache:
            params.type_k = params.type_v = llama.GGML_TYPE_F32
            params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama.llama_init_from_model(self.model, params)
        self.memory = llama.llama_get_memory(self.context)
        vocab = llama.llama_model_get_vocab(self.model)
        self.num_tokens = llama.llama_vocab_n_tokens(vocab)
        self.batch = llama.llama_batch_init(BATCH, 0, 1)
        try:
            return version("llama-cpp-python")
        except PackageNotFoundError:
            return llama.llama_print_system_info().decode()

    def generate(self, prompt: list[int], tokens: int, k: int | str) -> dict[str, Any]:
        times = FirstToken()
        self.prefill(prompt)
        ids = [int(self._rows(1)[0].argmax())]
        times.arrived()
        while len(ids) < tokens:
            self._decode(ids[-1:], len(prompt) + len(ids) - 1, 1)
            ids.append(int(self._rows(1)[0].argmax()))
        return {"tokens": ids, **times.split()}

    def prefill(self, tokens: list[int]) -> None:
        llama.llama_memory_clear(self.memory, True)
        self._decode(tokens, 0, 1)
        self._length = len(tokens)

    def run_pass(self, tokens: list[int]) -> None:
        self._decode(tokens, self._length, len(tokens))
        llama.llama_memory_seq_rm(self.memory, 0, self._length, -1)

    def logits(self, tokens: list[int]) -> np.ndarray:
        llama.llama_memory_clear(self.memory, True)
        self._decode(tokens, 0, len(tokens))
        return self._rows(len(tokens))

    def _decode(self, tokens: list[int], start: int, num_rows: int) -> None:
        """Run one pass that computes the logits of the last `num_rows` tokens."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i >= len(tokens) - num_rows
        if llama.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def _rows(self, count: int) -> np.ndarray:
        """Return the logits of the last pass, [count, V]."""
        pointer = llama.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (count, self.num_tokens))


def _dequantize(source: str, folder: Path) -> None:
    """Write a GGUF file with the same header and float32 tensors."""
    folder.mkdir()
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        element = field.types[-1] if is_array else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantize(whole: Path, folder: Path, precision: str) -> None:
    folder.mkdir()
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{precision}")
    source, target = (str(path / "model.gguf").encode() for path in (whole, folder))
    if llama.llama_model_quantize(source, target, ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantize to {precision}")


if __name__ == "__main__":
    serve(LlamaCpp())
