"""What drawing and judging cost a round, on fixed rows without any model. Development only.

    python tools/measure_sampling.py [--vocab-size 50257] [-k 4] [--output FILE]

Peaked rows have logits as a trained model's: a few tokens far above the rest. Flat rows are nearly
uniform, which is the worst case of every filter. A round draws K tokens from K draft rows and
judges them by K + 1 target rows where all are accepted, or by one where the first is rejected. The
settings take turns, and the figure is the least of many rounds: other programs only ever add to it.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from specedge import Sampling
from specedge.runtime.decoding.coupling import GumbelNoise
from specedge.runtime.decoding.verify import Draft, draw, verify
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.scores import Row, Scores

SETTINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(1.0),
    "top-k 50": Sampling(1.0, top_k=50),
    "top-p 0.95": Sampling(1.0, top_p=0.95),
    "top-p 0.9": Sampling(1.0, top_p=0.9),
    "typical-p 0.95": Sampling(1.0, typical_p=0.95),
    "three penalties": Sampling(
        1.0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1
    ),
    "temperature, gumbel": Sampling(1.0, noise=GumbelNoise(0)),
    "top-p 0.9, gumbel": Sampling(1.0, top_p=0.9, noise=GumbelNoise(0)),
}
UNIFORMS = np.random.default_rng(3).random(64)
PAST = History(range(0, 1000, 2), range(0, 1000, 3))


def rows_of(kind: str, count: int, vocab_size: int) -> np.ndarray:
    random = np.random.default_rng(1)
    rows = random.normal(0, 0.1 if kind == "flat" else 2, (count, vocab_size))
    if kind == "peaked":  # the likeliest token has about a third, the next hundred half
        for row in rows:
            row[random.permutation(vocab_size)[:100]] = 13 - 1.5 * np.log(np.arange(1, 101))
    return rows.astype(np.float32)


def drawn(rows: np.ndarray, sampling: Sampling) -> Draft:
    """A token of each row, and the distribution it came from."""
    tokens: list[int] = []
    distributions = []
    for row, uniform in zip(rows, UNIFORMS, strict=False):
        token, distribution = draw(Row(row), sampling, PAST.then(tokens), float(uniform))
        tokens.append(token)
        if distribution is not None:
            distributions.append(distribution)
    return Draft(tokens, distributions or None)


def round_of(rows: np.ndarray, sampling: Sampling, accepted: bool) -> Callable[[], int]:
    """One round's work on the host; it returns how many drafted tokens were accepted.

    The target's rows are the draft's; for a rejection the drafted tokens are less likely there.
    """
    targets = np.concatenate([rows, rows[:1]])
    if not accepted:
        for row, token in zip(targets, drawn(rows, sampling).tokens, strict=False):
            row[token] -= 20
    scores = Scores(targets)
    tests = np.full(len(rows), 0.0 if accepted else 1 - 2**-53)

    def run() -> int:
        if sampling.noise:
            sampling.noise.forget(PAST.length + len(targets))  # of all positions
        return verify(drawn(rows, sampling), scores, sampling, PAST, tests, 0.7).num_accepted

    return run


def measure(vocab_size: int, k: int, repeats: int) -> dict[str, dict[str, float]]:
    """Least milliseconds of a round by setting, for rows and outcomes of each kind."""
    runs: dict[tuple[str, str], Callable[[], int]] = {}
    for kind in ("peaked", "flat"):
        rows = rows_of(kind, k, vocab_size)
        for name, sampling in SETTINGS.items():
            for outcome in ("accepted", "rejected"):
                run = round_of(rows, sampling, outcome == "accepted")
                assert run() == (k if outcome == "accepted" else 0), (name, kind, outcome)
                runs[name, f"{kind}, {outcome}"] = run
    found: dict[str, dict[str, float]] = {name: {} for name in SETTINGS}
    for _ in range(repeats):
        for (name, case), run in runs.items():
            start = time.perf_counter()
            run()
            took = 1e3 * (time.perf_counter() - start)
            found[name][case] = min(took, found[name].get(case, took))
    return found


@click.command()
@click.option("--vocab-size", default=50_257, show_default=True, help="Tokens of a row.")
@click.option("-k", "k", default=4, show_default=True, help="Draft tokens a round.")
@click.option("--repeats", default=200, show_default=True, help="Rounds of each kind.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(vocab_size: int, k: int, repeats: int, output: Path | None) -> None:
    """Measure a round's milliseconds of drawing and judging."""
    found = measure(vocab_size, k, repeats)
    for name, cases in found.items():
        click.echo(f"{name:19} " + ", ".join(f"{c} {ms:.3f} ms" for c, ms in cases.items()))
    if output:
        facts = {"python": platform.python_version(), "numpy": np.__version__}
        facts |= {"vocab_size": vocab_size, "k": k, "repeats": repeats}
        output.write_text(json.dumps(facts | {"milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
