"""Damages of a bundle: of a file, or of its manifest as a dict."""

from __future__ import annotations


def removed(file):
    file.unlink()


def longer(file):
    file.write_bytes(file.read_bytes() + b"x")


def with_another_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def graph(manifest):
    return manifest["hosts"]["graphs"][0]


def of_format_9(manifest):
    manifest["format"] = 9


def without_graphs(manifest):
    manifest["hosts"] = None


def for_a_later_version(manifest):
    manifest["hosts"]["oldest_onnxruntime"] = "9.0"


def with_smaller_caches(manifest):
    for tensor in graph(manifest)["signature"]["inputs"]:
        if tensor["role"] == "state":
            tensor["shape"][2] = 64


def with_a_path_that_goes_up(manifest):
    manifest["files"]["../x.onnx"] = manifest["files"][graph(manifest)["file"]]


def with_an_unlisted_graph(manifest):
    del manifest["files"][graph(manifest)["file"]]
