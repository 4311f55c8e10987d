"""What a GPU gives: passes beside the time to read the weights, a round's parts, and the speed-up.

    python tools/gpu_bench.py prepare FOLDER --llama CHECKPOINT [--pair gpt2-xl ...]
    python tools/gpu_bench.py run FOLDER [--device cuda] [--report FILE]

Development only. `prepare` grows and exports the pairs, which takes no GPU and, with 8 billion
parameters, an hour: do it once, anywhere, and copy FOLDER. `run` is to take 8 minutes at most.
Weights are grown (docs/growing.md): times and memory are the shapes', text and acceptance are not.
CHECKPOINT is a small Llama, as tools/train_llama.py makes one. With PyTorch for CUDA installed,
transformers' assisted generation runs beside it. The report has what `specedge doctor` says, too.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

import specedge
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.ort import onnxruntime
from specedge.runtime.pipeline import Pipeline
from specedge.runtime.theory.formulas import alpha_from_tokens, speedup

PAIRS = {
    "gpt2-xl": ("gpt2", "gpt2-xl"),
    "tinyllama-1.1b": ("smollm2-135m", "tinyllama-1.1b"),
    "llama-3.1-8b": ("llama-3.2-1b", "llama-3.1-8b"),
}
PRECISIONS = ("fp16", "int4")
K = 4
PAST = 256
NEW_TOKENS = 96
PROMPTS = (
    "def read_config(path):\n    ",
    "import json\n\n\nclass Store:\n    def __init__(self",
    "for name in sorted(os.listdir(folder)):\n    ",
)
REPEATS = 3
PASSES = 30
COPIED = 1 << 28  # numbers of float32 that the bandwidth is measured with: 1 GiB


@dataclass(frozen=True)
class Least:
    """Seconds of one thing, repeated."""

    least: float
    middle: float

    @classmethod
    def of(cls, run: Callable[[], object], repeats: int) -> Least:
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return cls(min(times[1:]), median(times[1:]))  # the first binds and captures

    def milliseconds(self) -> dict[str, float]:
        return {"least": 1e3 * self.least, "median": 1e3 * self.middle}


def bandwidth(device: str) -> float:
    """Bytes a second that a device reads and writes, by an addition of two arrays."""
    import onnx
    from onnx import TensorProto, helper

    size = COPIED if device != "cpu" else COPIED >> 4
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [size]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    ort = onnxruntime()
    if device == "cpu":
        providers: list[Any] = ["CPUExecutionProvider"]
    else:
        index = device.partition(":")[2]
        providers = [("CUDAExecutionProvider", {"device_id": index or "0"})]
        ort.preload_dlls(cudnn=False)
    session = ort.InferenceSession(model.SerializeToString(), providers=providers)
    binding = session.io_binding()
    where = "cpu" if device == "cpu" else "cuda"
    x = ort.OrtValue.ortvalue_from_shape_and_type([size], np.float32, where)
    y = ort.OrtValue.ortvalue_from_shape_and_type([size], np.float32, where)
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    taken = Least.of(lambda: session.run_with_iobinding(binding), 10)
    return 8 * size / taken.least  # 4 bytes are read and 4 written


def passes(model: OrtModel, lengths: list[int]) -> dict[str, Any]:
    """A pass of each T behind a cache of `PAST` tokens, captured and, on a GPU, as it comes."""
    found: dict[str, Any] = {}
    session = model._session
    for length in lengths:
        model.truncate(0)
        model.prefill([0] * PAST)

        def captured(length: int = length) -> None:
            model.truncate(PAST)
            model.forward([0] * length)

        def eager(length: int = length, bound: Any = None) -> None:
            model.truncate(PAST)
            session.run(bound, [0] * length)

        found[str(length)] = {"captured": Least.of(captured, PASSES).milliseconds()}
        bound = session.bind(model.cache, length, length)
        once = Least.of(lambda b=bound: eager(bound=b), PASSES)
        found[str(length)]["eager"] = once.milliseconds()
    model.truncate(0)
    return found


def requests(pipeline: Pipeline) -> dict[str, Any]:
    """Plain decoding and K, in turn: milliseconds a token, the parts of a round, the same text?"""
    times: dict[int, list[float]] = {0: [], K: []}
    texts: dict[int, list[list[int]]] = {0: [], K: []}
    stats = None
    for _ in range(REPEATS):
        for prompt in PROMPTS:
            for k in times:
                pipeline.forget()
                one = pipeline.generate(
                    prompt, NEW_TOKENS, num_draft_tokens=k, drafter="model", ignore_eos=True
                )
                times[k].append(one.stats.decode_seconds / one.stats.num_new_tokens)
                texts[k].append(one.tokens)
                stats = one.stats if k else stats
    assert stats is not None
    seconds = {
        part: getattr(stats, f"{part}_seconds") for part in ("draft", "verify", "sampling", "other")
    }
    total = sum(seconds.values())
    per_round = stats.tokens_per_round or 1.0
    return {
        "plain": {"least": 1e3 * min(times[0]), "median": 1e3 * median(times[0])},
        "speculative": {"least": 1e3 * min(times[K]), "median": 1e3 * median(times[K])},
        "speedup": median(times[0]) / median(times[K]),
        "tokens_per_round": per_round,
        "same_text": sum(a == b for a, b in zip(texts[0], texts[K], strict=True)),
        "num_texts": len(texts[0]),
        "shares": {part: value / total for part, value in seconds.items()},
    }


def predicted(found: dict[str, Any]) -> float:
    """The speed-up by our form: passes as measured, acceptance as seen, no time between them."""
    target, draft = found["target"]["passes"], found["draft"]["passes"]
    plain = target["1"]["captured"]["median"]
    cost, verify = draft["1"]["captured"]["median"] / plain, target[str(K + 1)]["captured"]
    alpha = alpha_from_tokens(found["requests"]["tokens_per_round"], K)
    return speedup(alpha, K, cost, verify["median"] / plain)


def assisted(folder: Path) -> dict[str, Any] | str:
    """transformers on the same card, plain and with the draft as its assistant, in float16."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return "not run: transformers is not installed"
    if not torch.cuda.is_available():
        return "not run: this PyTorch has no CUDA"
    roles = ("target", "draft")
    models = {
        role: AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.float16).cuda()
        for role in roles
    }
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    config = models["draft"].generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0.0
    times: dict[str, list[float]] = {"plain": [], "assisted": []}
    for _ in range(REPEATS):
        for prompt in PROMPTS:
            given = tokenizer(prompt, return_tensors="pt").to("cuda")
            for name, options in (
                ("plain", {}),
                ("assisted", {"assistant_model": models["draft"]}),
            ):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                made = models["target"].generate(
                    **given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                    do_sample=False, **options,
                )  # fmt: skip
                torch.cuda.synchronize()
                took = time.perf_counter() - begin
                times[name].append(took / (made.shape[1] - given["input_ids"].shape[1]))
    del models
    torch.cuda.empty_cache()
    return {name: {"least": 1e3 * min(t), "median": 1e3 * median(t)} for name, t in times.items()}


def measure(folder: Path, precision: str, device: str, speed: float) -> dict[str, Any]:
    """Everything of one pair in one precision."""
    begin = time.perf_counter()
    with specedge.load(folder / precision, device=device) as pipeline:
        found: dict[str, Any] = {
            "load_seconds": time.perf_counter() - begin,
            "note": pipeline.note,
            "row_independent": list(pipeline.target.row_independent_lengths),
        }
        for role, lengths in (("target", [1, 2, K + 1]), ("draft", [1, 2])):
            model, facts = getattr(pipeline, role), pipeline.bundle.models[role]
            size = pipeline.bundle.files[facts.weights].size
            found[role] = {
                "ops": model.ops,
                "weights_bytes": size,
                "bound_milliseconds": 1e3 * size / speed,
                "passes": passes(model, lengths),
            }
        found["requests"] = requests(pipeline)
    found["predicted_speedup"] = predicted(found)
    gc.collect()
    return found


def table(report: dict[str, Any]) -> str:
    """For people, and for docs/performance.md."""
    lines = [
        "| pair | target | bound | T=1 | T=2 | T=5 | eager T=1 | draft T=1 | host | plain | K = 4 |"
        " speed-up (predicted) | same text |",
        "|---" * 13 + "|",
    ]
    for pair, found in report["pairs"].items():
        for precision in PRECISIONS:
            one = found.get(precision)
            if not isinstance(one, dict):
                continue
            target, draft, asked = one["target"], one["draft"], one["requests"]
            at = {t: p["captured"]["median"] for t, p in target["passes"].items()}
            host = asked["shares"]["sampling"] + asked["shares"]["other"]
            lines.append(
                f"| {pair} | {precision} | {target['bound_milliseconds']:.2f} | {at['1']:.2f} | "
                f"{at['2']:.2f} | {at[str(K + 1)]:.2f} | "
                f"{target['passes']['1']['eager']['median']:.2f} | "
                f"{draft['passes']['1']['captured']['median']:.2f} | {host:.1%} | "
                f"{asked['plain']['median']:.2f} | {asked['speculative']['median']:.2f} | "
                f"{asked['speedup']:.2f} ({one['predicted_speedup']:.2f}) | "
                f"{asked['same_text']} of {asked['num_texts']} |"
            )
        if isinstance(other := found.get("transformers"), dict):
            plain, helped = other["plain"]["median"], other["assisted"]["median"]
            lines.append(
                f"| {pair} | transformers, float16 | | | | | | | | {plain:.2f} | {helped:.2f} | "
                f"{plain / helped:.2f} | |"
            )
    return "\n".join(lines)


@click.group()
def main() -> None:
    """Pairs for a GPU, and what it makes of them."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--gpt2", default="models/checkpoints/python-9m", show_default=True)
@click.option("--llama", help="A small trained Llama, as tools/train_llama.py makes one.")
@click.option(
    "--pair", "pairs", type=click.Choice(list(PAIRS)), multiple=True, help="[default: all]"
)
@click.option(
    "--noise", default=0.02, show_default=True, help="Of the drafts: see docs/growing.md."
)
def prepare(
    folder: Path, gpt2: str, llama: str | None, pairs: tuple[str, ...], noise: float
) -> None:
    """Grow and export pairs into FOLDER."""
    from specedge.exporter import export

    for name in pairs or PAIRS:
        place = folder / name
        source = gpt2 if name == "gpt2-xl" else llama
        if source is None:
            raise click.UsageError(f"{name} is grown from a Llama: give --llama CHECKPOINT")
        for role, shape in zip(("draft", "target"), PAIRS[name], strict=True):
            if not (place / role / "config.json").exists():
                command = [sys.executable, str(Path(__file__).with_name("grow.py")), source]
                command += [
                    str(place / role),
                    "--shape",
                    shape,
                    "--dtype",
                    "float16",
                    "--tokens",
                    "0",
                ]
                command += ["--noise", str(noise)] if role == "draft" else []
                subprocess.run(command, check=True)
        for precision in PRECISIONS:
            if not (place / precision).exists():
                export(
                    place / "draft", place / "target", place / precision,
                    precision=precision, draft_precision=precision, compute="fp16",
                )  # fmt: skip
                click.echo(place / precision)


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--device", default="cuda", show_default=True)
@click.option("--report", type=click.Path(path_type=Path), help="Write everything there, as JSON.")
def run(folder: Path, device: str, report: Path | None) -> None:
    """Measure the pairs of FOLDER and print a table."""
    doctor = subprocess.run(
        [sys.executable, "-m", "specedge", "doctor", "--json"], capture_output=True, text=True
    )
    speed = bandwidth(device)
    found: dict[str, Any] = {
        "doctor": json.loads(doctor.stdout),
        "device": device,
        "bytes_per_second": speed,
        "pairs": {},
    }
    click.echo(f"{device}: {speed / 1e9:.0f} GB/s; milliseconds are medians")
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        one = found["pairs"][place.name] = {
            precision: measure(place, precision, device, speed)
            for precision in PRECISIONS
            if (place / precision / "bundle.json").exists()
        }
        if device != "cpu":
            one["transformers"] = assisted(place)
        if report is not None:  # what is measured is kept, whatever comes
            report.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    click.echo(table(found))


if __name__ == "__main__":
    main()
