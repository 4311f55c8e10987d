"""What `specedge generate --prompts FILE --ray` does on a cluster of nodes in processes here.

    python tools/measure_cluster.py lose [--prompts N] [--length N]
    python tools/measure_cluster.py scale [--prompts N] [--length N] [--actors N]...

`lose`: three nodes of a CPU each; when a third of the lines is there, one node is killed. The file
must be the one that a single process writes. `scale`: one node, actors with a thread each; prints a
row of a table for each number of them, from the first line to the last, beside a single process
with one thread. Development only; needs `pip install "specedge[cpu,ray]"`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from ray.cluster_utils import Cluster

STORE = 80 * 2**20  # bytes of a node's object store, about the least that Ray takes
NAMES = ("read", "parse", "merge", "open_all", "describe", "select", "wait_for", "encode")


def prompts(folder: Path, number: int) -> Path:
    """A file of so many different beginnings of Python functions."""
    lines = [f"def {NAMES[i % len(NAMES)]}_{i}(path, {'abcde'[i % 5]}):" for i in range(number)]
    path = folder / "prompts.txt"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def cluster(*cpus: int) -> tuple[Cluster, list[Any]]:
    """A head with the first number of CPUs, and nodes with the others."""
    own: dict[str, Any] = {"object_store_memory": STORE, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=own | {"num_cpus": cpus[0]})
    return found, [found.add_node(num_cpus=one, object_store_memory=STORE) for one in cpus[1:]]


def generate(
    path: Path, output: Path, length: int, *more: str, seen: Callable[[int], None] = lambda _: None
) -> tuple[float, float, str]:
    """Run the command; seconds to the first line and to the last, and what it says at the end."""
    command = [sys.executable, "-m", "specedge", "generate", "--prompts", str(path)]
    command += ["--output", str(output), "-n", str(length), "-k", "4", "--threads", "1"]
    command += ["--temperature", "0.8", "--seed", "1", "--ignore-eos", *more]
    start, times, total = time.perf_counter(), [], path.read_text("utf-8").count("\n")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            lines = output.read_bytes().count(b"\n") if output.exists() else 0
            if lines > len(times):
                times += [time.perf_counter() - start] * (lines - len(times))
                seen(lines)
            time.sleep(0.01)
        said = process.stderr.read() if process.stderr else ""
    assert process.returncode == 0, said
    assert len(times) == total, said
    return times[0], times[-1], said


@click.group()
def main() -> None:
    """Losing a node, and what a second actor gives."""


@main.command()
@click.option("--prompts", "number", default=300, show_default=True)
@click.option("--length", default=32, show_default=True)
def lose(number: int, length: int) -> None:
    """Kill one of three nodes in the middle, and compare the file with a single process's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, alone, spread = prompts(folder, number), folder / "alone", folder / "spread"
        generate(path, alone, length)
        nodes, others = cluster(1, 1, 1)

        def kill(lines: int) -> None:
            if others and lines >= number / 3:
                nodes.remove_node(others.pop(), allow_graceful=False)
                others.clear()
                print(f"killed a node after {lines} lines")

        try:
            first, last, said = generate(
                path, spread, length, "--ray", nodes.address, "--ray-actors", "3", seen=kill
            )
        finally:
            nodes.shutdown()
        same = spread.read_bytes() == alone.read_bytes()
        print(f"{number} lines, the first after {first:.1f} s, the last after {last:.1f} s")
        print(said.strip())
        print(f"the file is {'' if same else 'NOT '}that of a single process, byte for byte")
        sys.exit(not same)


@main.command()
@click.option("--prompts", "number", default=300, show_default=True)
@click.option("--length", default=64, show_default=True)
@click.option("--actors", multiple=True, type=int, default=(0, 1, 2), show_default=True)
def scale(number: int, length: int, actors: tuple[int, ...]) -> None:
    """Print what so many actors take; 0 is a process without Ray."""
    print("| actors | to the first line | from there to the last | tokens a second |")
    print("|---|---|---|---|")
    for num_actors in actors:
        with tempfile.TemporaryDirectory() as name:
            path, output = prompts(Path(name), number), Path(name) / "output"
            nodes = cluster(num_actors)[0] if num_actors else None
            asked = ("--ray", nodes.address) if nodes else ()
            try:
                first, last, _ = generate(path, output, length, *asked)
            finally:
                if nodes:
                    nodes.shutdown()
            rate = (number - 1) * length / (last - first)
            print(f"| {num_actors or 'none'} | {first:.1f} s | {last - first:.1f} s | {rate:.0f} |")


if __name__ == "__main__":
    main()
