"""Rounds by the graphs for hosts beside rounds by the Python runtime. Development only.

    python tools/measure_rounds.py BUNDLE ... [--length N] [--repeats N]

Each BUNDLE has graphs that `specedge embed` made. The tests' host and the runtime take turns on one
thread, at the bundle's K, and must write the same tokens; times are of the processor, so that other
programs count less. The host's time in ONNX Runtime is shown apart: all hosts have that; the rest
is Python. Peaks of memory are of processes of their own. Linux only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from measure_memory import MB, resident
from round_host import Fused, Host, Split
from specedge import load
from specedge.bundle import Bundle
from specedge.runtime.backend.self_test import fitting
from specedge.runtime.backend.sessions import Device

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, top-k 20, top-p 0.9": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
}
PROMPT = list(range(100, 140))
HEADER = [
    "| bundle | layout | setting | runtime | graphs' host | in ONNX Runtime alone "
    "| ratio, least | ratio, median | alone, least | alone, median |",
    "|" + "---|" * 10,
]
# Of settings: the tokens, the number of rounds, and seconds in ONNX Runtime if they are known.
Request = Callable[[dict[str, Any]], tuple[list[int], int, float]]


def host_of(bundle: Bundle) -> Host:
    """The tests' host of a bundle, on one thread."""
    assert bundle.hosts is not None
    device = fitting([*bundle.models.values()], Device(threads=1))
    files = {graph.name: bundle.path(graph.file) for graph in bundle.hosts.graphs}
    if "round" in files:
        return Fused(device.open(files["round"]), bundle)
    decoder = bundle.path(bundle.target.graph("decoder", bundle.hosts.ops).file)
    sessions = [device.open(path) for path in (files["draft"], decoder, files["accept"])]
    return Split(sessions, bundle, bundle.num_draft_tokens)


def by_graphs(bundle: Bundle, length: int) -> Request:
    """A request to the host."""
    host = host_of(bundle)

    def request(setting: dict[str, Any]) -> tuple[list[int], int, float]:
        for graph in host.graphs:
            graph.run_time = 0.0
        tokens, accepted = host.generate(PROMPT, length, seed=1, **setting)
        return tokens, len(accepted), sum(graph.run_time for graph in host.graphs)

    return request


def by_runtime(bundle: Bundle, length: int) -> Request:
    """The same request to the runtime."""
    pipeline = load(bundle.folder, threads=1)
    k = bundle.num_draft_tokens

    def request(setting: dict[str, Any]) -> tuple[list[int], int, float]:
        pipeline.forget()
        made = pipeline.generate(
            PROMPT, length, seed=1, num_draft_tokens=k, drafter="model", ignore_eos=True, **setting
        )
        return made.tokens, made.stats.num_rounds, 0.0

    return request


WAYS = {"runtime": by_runtime, "graphs": by_graphs}


def rows(bundle: Bundle, length: int, repeats: int) -> list[str]:
    """A bundle's lines of the table."""
    made = {name: way(bundle, length) for name, way in WAYS.items()}
    layout = "fused" if any(g.name == "round" for g in bundle.hosts.graphs) else "split"
    found = []
    for name, setting in SETTINGS.items():
        times: dict[str, list[float]] = {way: [] for way in (*WAYS, "alone")}
        for _ in range(repeats + 1):
            said = {}
            for way, request in made.items():
                start = time.process_time()
                said[way], num_rounds, alone = request(setting)
                times[way].append(1e3 * (time.process_time() - start) / num_rounds)
                if alone:
                    times["alone"].append(1e3 * alone / num_rounds)
            assert said["graphs"] == said["runtime"], f"{bundle.folder}, {name}: other tokens"
        runtime, graphs, alone = (times[way][1:] for way in times)  # the first of each warms up
        cells = [f"{min(one):.2f} ms" for one in (runtime, graphs, alone)]
        for one in (graphs, alone):
            cells += [f"{of(one) / of(runtime):.2f}" for of in (min, median)]
        found.append(f"| {bundle.folder.name} | {layout} | {name} | {' | '.join(cells)} |")
    return found


def peak(folder: Path, way: str) -> float:
    """Megabytes of a process that answers a request one way."""
    command = [sys.executable, __file__, "--one", way, str(folder)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / MB


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--length", default=100, show_default=True, help="New tokens of a request.")
@click.option("--repeats", default=9, show_default=True)
@click.option("--one", hidden=True, type=click.Choice([*WAYS]))
def main(bundles: tuple[Path, ...], length: int, repeats: int, one: str | None) -> None:
    """Print times of rounds and peaks of memory of each bundle, both ways."""
    if one:
        WAYS[one](Bundle.read(bundles[0]), 16)(SETTINGS["temperature 1"])
        click.echo(resident("VmHWM"))
        return
    click.echo("\n".join(HEADER))
    for folder in bundles:
        click.echo("\n".join(rows(Bundle.read(folder), length, repeats)))
    for folder in bundles:
        peaks = ", ".join(f"{way} {peak(folder, way):.0f} MB" for way in WAYS)
        click.echo(f"peak of {folder.name}: {peaks}")


if __name__ == "__main__":
    main()
