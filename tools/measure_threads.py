"""What sessions with pools of their own cost beside one pool that the process shares.

    python tools/measure_threads.py [--bundle FOLDER] [--threads N] [--prompts N] [--length N]

A process can have the shared pool or sessions' own, so each way has a process, and each prompt goes
to all of them in turn, in an order that turns round. The figure is the median over prompts of the
seconds of whole requests as a ratio to the shared pool's. Development only.
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import click

from measure_pair import prompts

WAYS = {"shared pool": True, "own pools": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"num_draft_tokens": 0},
    "speculative": {"num_draft_tokens": 4},
}


def serve(pipe: Connection, bundle: str | None, threads: int | None, shared: bool) -> None:
    """Answer each (text, options) with the seconds of its request."""
    from specedge import load

    pipeline = load(bundle, threads=threads, share_threads=shared)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        text, options = asked
        pipeline.forget()
        stats = pipeline.generate(text, ignore_eos=True, **options).stats
        pipe.send(stats.prefill_seconds + stats.decode_seconds)


@click.command()
@click.option("--bundle", default=None)
@click.option("--threads", type=int, default=None)
@click.option("--prompts", "count", default=12, show_default=True)
@click.option("--length", default=96, show_default=True)
def main(bundle: str | None, threads: int | None, count: int, length: int) -> None:
    """Measure both ways and print the ratios."""
    from specedge import load

    context = multiprocessing.get_context("spawn")
    texts = prompts(load(bundle, threads=1, share_threads=False), count)
    pipes = {}
    for name, shared in WAYS.items():
        pipes[name], other = context.Pipe()
        context.Process(target=serve, args=(other, bundle, threads, shared), daemon=True).start()
        pipes[name].recv()
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for i, text in enumerate([texts[0], *texts]):
        for setting, options in SETTINGS.items():
            for name in list(WAYS) if i % 2 else list(WAYS)[::-1]:
                pipes[name].send((text, options | {"max_new_tokens": length}))
                took = pipes[name].recv()
                if i:  # the first warms up
                    seconds[setting, name].append(took)
    for setting in SETTINGS:
        pairs = zip(seconds[setting, "own pools"], seconds[setting, "shared pool"], strict=True)
        ratios = sorted(own / shared for own, shared in pairs)
        print(
            f"{setting}: own pools take {median(ratios):.3f} of the shared pool's time "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
