"""What ways to compute experts cost, and whether rows keep their bits. Development only.

    python tools/measure_experts.py [--hidden H] [--inner I] [--experts E] [--chosen K]

One layer's experts, of random numbers, in ONNX Runtime: as `gqa` and `onnx` have them, as `gqa` has
them in integers, and two ways that no graph has, the MoE node with each row once and each row's own
matrices gathered. All take turns on one thread, whose own seconds are counted. Rows that share a
pass have the same experts ("shared") or their own.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from specedge.exporter.graph.weights import Weights, drop_unused
from specedge.exporter.quantization.choosing import Choice
from specedge.exporter.quantization.experts import apart, mixtures
from specedge.exporter.quantization.rewriting import Rewriter
from specedge.exporter.quantization.storing import Store
from specedge.exporter.tracing.attention import OPSET, TracedPass, running
from specedge.exporter.tracing.families import registered

NAMES = ("rows", "chosen", "weights")
LENGTHS = (1, 2, 5, 8, 64)
GATHERED = 8  # rows of a pass at most, whose matrices are gathered


class Block(torch.nn.Module):
    """Experts by themselves."""

    def __init__(self, module: torch.nn.Module, ops: str) -> None:
        super().__init__()
        self.module, self.ops, zero = module, ops, torch.zeros(1, dtype=torch.long)
        self.one = TracedPass(ops, zero, zero[None], 8)

    def forward(self, rows: Any, chosen: Any, weights: Any) -> torch.Tensor:
        """[T, H], 2 * [T, k] -> [T, H]"""
        if self.ops == "gathered":
            return _gathered(self.module, rows, chosen, weights)
        with running(self.one):
            return self.module(rows, chosen, weights)


def _gathered(module: Any, rows: Any, chosen: Any, weights: Any) -> torch.Tensor:
    first, last = module.gate_up_proj[chosen], module.down_proj[chosen]
    inner = module._apply_gate(torch.matmul(first, rows[:, None, :, None])[..., 0])
    return (torch.matmul(last, inner[..., None])[..., 0] * weights[..., None]).sum(1)


def graph(module: torch.nn.Module, ops: str, given: tuple[torch.Tensor, ...]) -> onnx.ModelProto:
    """The experts alone as a graph, with T symbolic."""
    block, length = Block(module, ops).eval(), torch.export.Dim("T", min=1)
    with registered(block):
        program = torch.onnx.export(
            block, given, input_names=NAMES, opset_version=OPSET, dynamo=True, verbose=False,
            dynamic_shapes={name: {0: length} for name in NAMES},
        )  # fmt: skip
    assert program is not None
    return program.model_proto


def once(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph, whose MoE node gets each row once."""
    single = onnx.ModelProto()
    single.CopyFrom(proto)
    del single.graph.value_info[:]
    for node in single.graph.node:
        if node.op_type == "Concat":
            del node.input[1:]
    return single


def rounded(proto: onnx.ModelProto, bits: int, number: int) -> onnx.ModelProto:
    """The same graph, whose experts are integers of so many bits."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (made := folder / "made").mkdir()
        model = ir.from_proto(proto)
        with Weights(folder, "float32") as weights:
            weights.attach(model)
            weights.finish()
        (mixture,) = mixtures(model.graph, apart([model.graph], number))
        with Store(made) as store:
            choice = Choice(None, 1, 0.0, 0.0, bits)
            Rewriter(model.graph, store, {}).experts(mixture, choice)
        RemoveUnusedNodesPass()(model)
        drop_unused(model.graph)
        ir.save(model, made / "m.onnx")
        return onnx.load(made / "m.onnx")


def session(proto: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(proto.SerializeToString(), options)


def keeps_bits(one: onnxruntime.InferenceSession, given: list[np.ndarray]) -> bool:
    """Whether passes of 1, 2 and 5 rows have the bits of a pass of all."""
    whole = _run(one, given)
    parts = [slice(i, i + n) for n in (1, 2, 5) for i in range(0, len(whole) - n + 1, n)]
    return all(np.array_equal(_run(one, [g[p] for g in given]), whole[p]) for p in parts)


@click.command()
@click.option("--hidden", default=1024, show_default=True, help="Size of a row.")
@click.option("--inner", default=512, show_default=True, help="Inner values of an expert.")
@click.option("--experts", default=32, show_default=True, help="Experts.")
@click.option("--chosen", default=4, show_default=True, help="Experts that a row takes.")
@click.option("--repeats", default=15, show_default=True, help="Passes of each kind.")
def main(hidden: int, inner: int, experts: int, chosen: int, repeats: int) -> None:
    """Measure ways to compute one layer's experts."""
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=experts,
        num_experts_per_tok=chosen,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = MixtralExperts(config).requires_grad_(False)
    for matrices in module.parameters():
        matrices.normal_(0, matrices.shape[-1] ** -0.5)
    rows = torch.randn(max(LENGTHS), hidden)
    own = torch.rand(max(LENGTHS), experts).topk(chosen).indices
    given = [rows, own, torch.rand(max(LENGTHS), chosen)]
    example = tuple(part[:5] for part in given)
    node = graph(module, "gqa", example)
    protos = {"gqa": node, "onnx": graph(module, "onnx", example), "node, rows once": once(node)}
    protos |= {f"gqa, {bits} bits": rounded(node, bits, experts) for bits in (8, 4)}
    protos["gathered"] = graph(module, "gathered", example)
    runs = {name: session(protos.pop(name)) for name in list(protos)}
    arrays = [part.numpy() for part in given]
    shared = [arrays[0], np.repeat(arrays[1][:1], len(rows), 0), arrays[2]]
    for name, one in runs.items():
        held = [keeps_bits(one, [part[:10] for part in kind]) for kind in (shared, arrays)]
        click.echo(f"{name}: rows keep their bits: shared experts {held[0]}, own {held[1]}")
    for length in LENGTHS:
        seconds = defaultdict(list)
        for _ in range(repeats):
            for name, one in runs.items():
                if name != "gathered" or length <= GATHERED:
                    start = time.process_time()
                    _run(one, [a[:length] for a in arrays])
                    seconds[name].append(time.process_time() - start)
        shown = ", ".join(f"{name} {1e3 * median(found):.1f}" for name, found in seconds.items())
        click.echo(f"{length} rows, milliseconds: {shown}")


def _run(one: onnxruntime.InferenceSession, given: list[np.ndarray]) -> np.ndarray:
    return one.run(None, dict(zip(NAMES, given, strict=True)))[0]


if __name__ == "__main__":
    main()
