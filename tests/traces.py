"""Cache of PyTorch traces, shared by models that differ in weights only."""

import ast
import contextlib
import hashlib
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import numpy as np
import onnx_ir as ir
import torch
from filelock import FileLock
from onnx_ir.tensor_adapters import TorchTensor

from specedge.exporter.tracing import tracer

TRANSLATED = tracer.translate  # which no test has swapped
LIBRARIES = ("specedge", "torch", "transformers")  # identified by version in the trace cache key
# Fields of configs and modules that no computation reads; `_form` has the weights' types.
IGNORED = {
    "_name_or_path", "_use_kernels", "architectures", "bos_token_id", "dtype", "eos_token_id",
    "initializer_range", "name_or_path", "pad_token_id", "quantization_config",
    "transformers_version",
}  # fmt: skip


def _code(path):
    """Return a module's code without comments and docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            node.body[0].value.value = ""
    return ast.dump(tree)


_SOURCES = sorted(Path(tracer.__file__).parent.glob("*.py"))
_CODE = (  # further inputs of the trace cache key
    *(version(name) for name in ("torch", "transformers", "onnxscript", "onnx-ir")),
    *(hashlib.sha256(_code(path).encode()).hexdigest() for path in _SOURCES),
)


# The command line whose exports use the folder of `remembered`.
WITH_TRACES = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]}\n"
    "import os, traces; from specedge.__main__ import main\n"
    "with traces.remembered(os.environ['SPECEDGE_TRACES']): main()",
)


@contextlib.contextmanager
def remembered(folder: Path | str):
    """Let PyTorch trace a model only where `folder` has no trace of a model of its form.

    Processes may share the folder. `SPECEDGE_TRACES` names one that outlives a run of tests.
    """
    folder = Path(os.environ.get("SPECEDGE_TRACES", folder))
    folder.mkdir(parents=True, exist_ok=True)
    with (
        mock.patch.object(tracer, "translate", _remembering(folder)),
        mock.patch.dict(os.environ, SPECEDGE_TRACES=str(folder)),
    ):
        yield


def _remembering(folder):
    def program(whole, geometry):
        if _is_changed(whole):
            return TRANSLATED(whole, geometry)
        form = repr((_form(whole), geometry, _CODE))
        path = folder / f"{hashlib.sha256(form.encode()).hexdigest()}.onnx"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                traced = TRANSLATED(whole, geometry)
                ir.save(traced.model, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)
                return traced
        return torch.onnx.ONNXProgram(_filled(path, whole), None)

    return program


def _form(whole):
    """Return the cache key of a trace; weights that share memory count once."""
    seen = {}
    weights = tuple(
        (name, tuple(t.shape), t.stride(), t.dtype, seen.setdefault(id(t), name))
        for name, t in whole.named_parameters(remove_duplicate=False)
    )
    config = whole.model.config
    options = {name: x for name, x in config.to_dict().items() if name not in IGNORED}
    options = json.loads(json.dumps(options, default=str), parse_float=_rounded)
    return (
        whole.ops,
        whole.last,
        str(whole.layers),
        whole.marked,
        tuple((name, type(module), _own(module)) for name, module in whole.named_modules()),
        weights,
        json.dumps(options, sort_keys=True),
        config._attn_implementation,
    )


def _is_changed(whole):
    """Return True if a module has hooks or a forward that is not the exporter's."""
    return any(
        module._forward_hooks
        or module._forward_pre_hooks
        or not _name(module).startswith("specedge.")
        or type(module).forward.__module__.partition(".")[0] not in LIBRARIES
        for module in whole.modules()
    )


def _own(module):
    """Return a module's plain attributes and its replaced forward."""
    plain = {
        name: _rounded(x) if isinstance(x, float) else x
        for name, x in vars(module).items()
        if isinstance(x, int | float | str) and name not in IGNORED
    }
    return str(plain), _name(module)


def _rounded(number):
    """Return a number in the precision of graphs and of GGUF files."""
    return float(np.float32(number))


def _name(module):
    """Return the name of the function that replaces a module's forward."""
    forward = vars(module).get("forward")
    return "specedge." if forward is None else f"{forward.__module__}.{forward.__qualname__}"


def _weights(whole):
    parameters = whole.named_parameters(remove_duplicate=False)
    return dict([*parameters, *whole.named_buffers(remove_duplicate=False)])


def _filled(path, whole):
    """Return a stored graph whose initializers share the model's memory."""
    model = ir.load(path)
    for name, tensor in _weights(whole).items():
        if name in model.graph.initializers:
            value = model.graph.initializers[name]
            value.const_value = TorchTensor(tensor, name)
            value.type = ir.TensorType(value.const_value.dtype)  # a clone shares the other's
    return model
