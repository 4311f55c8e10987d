"""Record token ids of llama.cpp's tokenizers for tests/exporter/checkpoint.

    python tools/gguf_tokenizer_vectors.py [FILE.gguf ...]

Requires llama-cpp-python and gguf. The vocabularies are those of the files, by default variants of
the embedded tokenizer, one for each pre-tokenizer.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp.llama_cpp as llama

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
VECTORS = ROOT / "tests" / "exporter" / "checkpoint" / "gguf_tokenizer_vectors.json"
MAX_TOKENS = 1 << 16

from gguf_vocabularies import byte_level, digests, sentencepiece  # noqa: E402
from tokenizer_lines import lines  # noqa: E402


def main() -> None:
    vectors: dict[str, Any] = json.loads(VECTORS.read_text("utf-8")) if VECTORS.exists() else {}
    vectors["llama-cpp-python"] = version("llama-cpp-python")
    llama.llama_backend_init()
    if sys.argv[1:]:
        for path in map(Path, sys.argv[1:]):
            vectors["files"][path.name] = digests(tokenize(path))
    else:
        names = vectors["gpt2"]
        vectors["gpt2"] = {name: _of_fields(byte_level(name)) for name in names}
        vectors["llama"] = {
            name: _of_fields(sentencepiece(name == "prefix")) for name in ("prefix", "plain")
        }
    VECTORS.write_text(json.dumps(vectors, indent=1) + "\n", "utf-8")


def _of_fields(fields: dict[str, Any]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, value in fields.items():
            _add(writer, name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return digests(tokenize(path))


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    else:
        writer.add_string(name, value)


def tokenize(path: Path) -> list[list[int]]:
    """Return llama.cpp's ids of all lines, with BOS and special tokens."""
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    vocabulary, buffer = llama.llama_model_get_vocab(model), (llama.llama_token * MAX_TOKENS)()
    rows = []
    for line in lines():
        text = line.encode()
        count = llama.llama_tokenize(vocabulary, text, len(text), buffer, MAX_TOKENS, True, True)
        rows.append(list(buffer[:count]))
    llama.llama_model_free(model)
    return rows


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _silence(level: int, text: bytes, data: int) -> None:
    """Drop llama.cpp's messages."""


if __name__ == "__main__":
    llama.llama_log_set(_silence, ctypes.c_void_p(0))
    main()
