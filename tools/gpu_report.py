"""Measure a GPU, and collect results of tests and measurements in one report file.

    pytest -m gpu tests/gpu --gpu-report gpu.json
    python tools/gpu_report.py prepare FOLDER [--shape 1.5b]
    python tools/gpu_report.py run FOLDER [--device cuda] [--report gpu.json]

`prepare` needs no GPU: it expands SmolLM2-135M to a larger target (tools/grow.py) and exports the
pair; copy FOLDER to the machine with the GPU. `run` takes about 8 minutes. If PyTorch supports
CUDA, transformers' assisted generation is measured on the same pair. The report contains the output
of `specedge doctor`, tests by name and measurements by device.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

import real_weights
from harness import table_header, table_row

K = 4
PAST = 256  # cached tokens before a pass
NEW_TOKENS = 96
REQUEST_REPEATS, PASS_REPEATS = 3, 30
PRECISIONS = ("fp16", "int4")
PROMPTS = (
    "def read_config(path):\n    ",
    "import json\n\n\nclass Store:\n    def __init__(self",
    "for name in sorted(os.listdir(folder)):\n    ",
)
COLUMNS = (
    *("model", "bound", "T=1", "T=2", f"T={K + 1}", "eager T=1", "draft T=1", "host share"),
    *("plain", f"K = {K}", "speed-up", "predicted", "same text"),
)


class Report:
    """Report file, whose parts are updated separately."""

    def __init__(self, path: Path) -> None:
        self.path = path
        command = [sys.executable, "-m", "specedge", "doctor", "--json"]
        output = subprocess.run(command, capture_output=True, text=True).stdout
        self._doctor: dict[str, Any] = json.loads(output)
        self.read()

    def read(self) -> dict[str, Any]:
        """Return the file's content. Raises ClickException if it is not one of this machine."""
        if not self.path.exists():
            return {"doctor": self._doctor}
        content = None
        with suppress(ValueError):
            content = json.loads(self.path.read_text("utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("doctor"), dict):
            raise click.ClickException(f"{self.path} is not a report; name another file")
        before, now = _machine(content["doctor"]), _machine(self._doctor)
        if before != now:
            raise click.ClickException(
                f"{self.path} was written on another machine: {before}; this is {now}"
            )
        return content | {"doctor": self._doctor}

    def put(self, part: str, values: dict[str, Any]) -> None:
        """Add or replace entries of a part, "tests" or "bench"."""
        content = self.read()
        content[part] = content.get(part, {}) | values
        temporary = self.path.with_name(f"{self.path.name}.new")
        temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        os.replace(temporary, self.path)


def _machine(doctor: dict[str, Any]) -> str:
    driver = doctor.get("driver", {})
    gpus = ", ".join(gpu["name"] for gpu in driver.get("gpus", []))
    version = doctor.get("onnxruntime", {}).get("version")
    return f"ONNX Runtime {version}, driver {driver.get('version')}, {gpus or 'no GPU'}"


def milliseconds(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Time a function after one warm-up call that binds buffers and captures graphs."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return {"min": min(times[1:]), "median": median(times[1:])}


def bandwidth(device: str, size: int = 1 << 28) -> float:
    """Return the bytes per second of x + x with `size` float32 elements on a device."""
    from onnx import TensorProto, helper

    from specedge.runtime.backend.ort import inference_session, onnxruntime

    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [size]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 21)]
    data = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    ort, (provider, _, number) = onnxruntime(), device.partition(":")
    index, options = int(number or 0), ort.SessionOptions()
    providers: list[Any] = ["CPUExecutionProvider"]
    if provider != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        providers = [("CUDAExecutionProvider", {"device_id": str(index)})]
        ort.preload_dlls(cudnn=False)
    session = inference_session(data, options, providers)
    binding, memory = session.io_binding(), "cpu" if provider == "cpu" else "cuda"
    x, y = (
        ort.OrtValue.ortvalue_from_shape_and_type([size], np.float32, memory, index)
        for _ in range(2)
    )
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    return 8e3 * size / milliseconds(lambda: session.run_with_iobinding(binding), 10)["min"]


def measure_pair(folder: Path, device: str, speed: float) -> dict[str, Any]:
    """Measure passes, draft calls and requests of a bundle, in milliseconds."""
    import specedge
    from specedge.sampling_options import Sampling
    from specedge.theory.formulas import alpha_from_tokens, speedup

    start = time.perf_counter()
    result: dict[str, Any] = {}
    with specedge.load(folder, device=device) as pipeline:
        result |= {"load_seconds": time.perf_counter() - start, "note": pipeline.note}
        for role, lengths in (("target", [1, 2, K + 1]), ("draft", [1, 2])):
            model, entry = getattr(pipeline, role), pipeline.bundle.models[role]
            size = pipeline.bundle.files[entry.weights].size
            result[role] = {
                "ops": model.ops,
                "bound": 1e3 * size / speed,
                "passes": {str(length): _pass(model, length) for length in lengths},
            }
        for name, sampling in (("greedy", Sampling()), ("drawn", Sampling(temperature=1.0))):
            result["draft"][f"call, {name}"] = _draft_call(pipeline.draft, sampling)
        result["requests"] = _requests(pipeline)
    passes = result["target"]["passes"]
    plain, verify = (passes[str(length)]["captured"]["median"] for length in (1, K + 1))
    call = result["draft"]["call, greedy"]
    draft = call["median"] / K if call else result["draft"]["passes"]["1"]["captured"]["median"]
    alpha = alpha_from_tokens(result["requests"]["tokens_per_round"], K)
    result["predicted_speedup"] = speedup(alpha, K, draft / plain, verify / plain)
    gc.collect()
    return result


def _pass(model: Any, length: int) -> dict[str, Any]:
    """Time a pass of T tokens, with and without a captured CUDA graph."""
    model.truncate(0)
    model.prefill([0] * PAST)
    session = model._session
    bound = session.bind(model.cache, length, length)

    def run(eager: bool) -> None:
        model.truncate(PAST)
        if eager:
            session.run(bound, [0] * length)
        else:
            model.forward([0] * length)

    times = {
        "captured": milliseconds(lambda: run(False), PASS_REPEATS),
        "eager": milliseconds(lambda: run(True), PASS_REPEATS),
    }
    model.truncate(0)
    return times


def _draft_call(model: Any, sampling: Any) -> dict[str, float] | None:
    """Time a draft of K tokens in one call; None if the bundle drafts by passes."""
    from specedge.runtime.decoding.verification import DraftRequest
    from specedge.runtime.sampling.history import History

    model.truncate(0)
    model.prefill([0] * PAST)
    request = DraftRequest(History([0]), K, sampling, np.full(K, 0.5))
    if model.draft([0], request) is None:
        return None

    def run() -> None:
        model.truncate(PAST)
        model.draft([0], request)

    times = milliseconds(run, PASS_REPEATS)
    model.truncate(0)
    return times


def _requests(pipeline: Any) -> dict[str, Any]:
    """Time plain and speculative decoding alternately, in milliseconds per token."""
    times: dict[int, list[float]] = {0: [], K: []}
    texts: dict[int, list[list[int]]] = {0: [], K: []}
    stats = None
    for prompt in PROMPTS * REQUEST_REPEATS:
        for k in times:
            pipeline.forget()
            result = pipeline.generate(
                prompt, NEW_TOKENS, num_draft_tokens=k, drafter="model", ignore_eos=True
            )
            times[k].append(1e3 * result.stats.decode_seconds / result.stats.num_new_tokens)
            texts[k].append(result.tokens)
            stats = result.stats if k else stats
    parts = {part: getattr(stats, f"{part}_seconds") for part in ("draft", "verify", "sampling")}
    total = sum(parts.values()) + stats.other_seconds
    return {
        "plain": median(times[0]),
        "speculative": median(times[K]),
        "speedup": median(times[0]) / median(times[K]),
        "tokens_per_round": stats.tokens_per_round or 1.0,
        "same_text": sum(a == b for a, b in zip(*texts.values(), strict=True)),
        "num_texts": len(texts[0]),
        "shares": {part: seconds / total for part, seconds in parts.items()},
    }


def assisted_generation(folder: Path, device: str) -> dict[str, float] | str:
    """Time transformers' plain and assisted generation in float16, in milliseconds per token."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return "not run: transformers is not installed"
    if not torch.cuda.is_available():
        return "not run: this PyTorch has no CUDA"
    card = f"cuda:{int(device.partition(':')[2] or 0)}"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.float16).to(card)
        for role in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    config = draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0.0
    lengths = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    times: dict[str, list[float]] = {"plain": [], "assisted": []}
    for prompt in PROMPTS * REQUEST_REPEATS:
        inputs = tokenizer(prompt, return_tensors="pt").to(card)
        for name, options in (("plain", {}), ("assisted", {"assistant_model": draft})):
            torch.cuda.synchronize(card)
            start = time.perf_counter()
            target.generate(**inputs, **lengths, **options)
            torch.cuda.synchronize(card)
            times[name].append(1e3 * (time.perf_counter() - start) / NEW_TOKENS)
    del target, draft
    torch.cuda.empty_cache()
    return {name: median(values) for name, values in times.items()}


def bench_table(bench: dict[str, Any]) -> str:
    """Return the measurements of a device as a Markdown table."""
    lines = [table_header(*COLUMNS)]
    for name, result in bench["models"].items():
        target, draft, requests = result["target"], result["draft"], result["requests"]
        passes = {t: p["captured"]["median"] for t, p in target["passes"].items()}
        times = [
            *(target["bound"], passes["1"], passes["2"], passes[str(K + 1)]),
            target["passes"]["1"]["eager"]["median"],
            draft["passes"]["1"]["captured"]["median"],
        ]
        host = 1 - requests["shares"]["draft"] - requests["shares"]["verify"]
        ratios = requests["plain"], requests["speculative"], requests["speedup"]
        cells = [f"{x:.2f}" for x in (*ratios, result["predicted_speedup"])]
        same = f"{requests['same_text']} of {requests['num_texts']}"
        lines.append(table_row(name, *(f"{x:.2f}" for x in times), f"{host:.1%}", *cells, same))
    return "\n".join([*lines, f"transformers, float16: {bench['transformers']}"])


@click.group()
def main() -> None:
    """Prepare a pair for a GPU, and measure it."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--shape", default="7b", show_default=True, help="Shape of the target.")
@click.option("--noise", default=0.02, show_default=True, help="Noise of the target's weights.")
def prepare(folder: Path, shape: str, noise: float) -> None:
    """Grow the target and export the pair in each precision."""
    from grow import grow
    from specedge.exporter import export

    sys.path[:0] = [str(Path(__file__).with_name("peers"))]
    from reference import Reference

    if not (folder / "draft").exists():
        gguf = real_weights.path_of(real_weights.SMOLLM2)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            Path(Reference(gguf, Path(cache)).checkpoint).rename(folder / "draft")
    if not (folder / "target").exists():
        grow(folder / "draft", folder / "target", shape, noise)
    for precision in PRECISIONS:
        if not (folder / precision).exists():
            options = {"precision": precision, "draft_precision": precision, "compute": "fp16"}
            export(folder / "draft", folder / "target", folder / precision, **options)
            click.echo(folder / precision)


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--device", default="cuda", show_default=True)
@click.option("--report", "path", type=click.Path(path_type=Path), help="Report file to extend.")
def run(folder: Path, device: str, path: Path | None) -> None:
    """Measure the pair of FOLDER and print a table."""
    report = None if path is None else Report(path)
    try:
        speed = bandwidth(device, 1 << 24 if device == "cpu" else 1 << 28)
    except Exception as error:  # ONNX Runtime's own types
        reason = str(error).strip().splitlines()[-1]
        message = f"{device} does not run here ({reason}); try specedge doctor"
        raise click.ClickException(message) from error
    bench: dict[str, Any] = {"bytes_per_second": speed, "models": {}, "transformers": "not run"}
    for precision in PRECISIONS:
        if (folder / precision).exists():
            bench["models"][precision] = measure_pair(folder / precision, device, speed)
            if report is not None:  # now, as a driver fault may end the process
                report.put("bench", {device: bench})
    if device != "cpu":
        bench["transformers"] = assisted_generation(folder, device)
        if report is not None:
            report.put("bench", {device: bench})
    click.echo(f"{device}: {speed / 1e9:.0f} GB/s; milliseconds are medians\n{bench_table(bench)}")


if __name__ == "__main__":
    main()
