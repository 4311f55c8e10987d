"""How long a prompt takes by passes of each length, with and without logits. Development only.

    python tools/measure_prompt.py [--bundle FOLDER] [--seconds 60]

Ways take turns. Figures are the least of all: wall time, and CPU time, which other programs
disturb less.
"""

from __future__ import annotations

import time
from pathlib import Path

import click

from specedge.bundle import Bundle, store
from specedge.runtime.backend.model_session import ModelSession
from specedge.runtime.backend.sessions import Device

LENGTHS = (32, 64, 128, 256, 512)


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--tokens", default=499, show_default=True, help="Of the prompt.")
@click.option("--threads", type=int, help="Of the CPU. [default: one a core]")
@click.option("--seconds", default=60.0, show_default=True, help="For all turns.")
def main(bundle: str | None, tokens: int, threads: int | None, seconds: float) -> None:
    """Print milliseconds of a prompt in the target by the length of its passes."""
    found = Bundle.read(Path(store.find_bundle(bundle)))
    session = ModelSession(found, found.target, Device(threads=threads), "auto", "decoder")
    cache = session.cache()
    prompt = [i % found.target.vocab_size for i in range(tokens)]

    def read(length: int, with_logits: bool) -> None:
        cache.truncate(0)
        for start in range(0, tokens, length):
            chunk = prompt[start : start + length]
            session.run(session.bind(cache, len(chunk), len(chunk) * with_logits), chunk)

    ways = [(length, logits) for length in LENGTHS for logits in (False, True)]
    best = {way: (float("inf"), float("inf")) for way in ways}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for way in ways:
            wall, cpu = time.perf_counter(), time.process_time()
            read(*way)
            now = time.perf_counter() - wall, time.process_time() - cpu
            best[way] = min(best[way][0], now[0]), min(best[way][1], now[1])
    click.echo("tokens a pass | ms, no logits | CPU ms | ms, all logits | CPU ms")
    for length in LENGTHS:
        figures = [1e3 * x for logits in (False, True) for x in best[length, logits]]
        click.echo(" | ".join([str(length), *(f"{x:.1f}" for x in figures)]))


if __name__ == "__main__":
    main()
