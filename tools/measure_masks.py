"""What the masks of a grammar cost a round. Development only.

    python tools/measure_masks.py [--bundle FOLDER] [-k 4] [--seeds 5] [--drafter model]

Texts of the embedded pair under the twenty schemas of tests/schemas.py. A mask is
timed where it is computed, once a position; the host's part of a round is all but the passes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from specedge import load
from specedge.runtime.text.grammars import Constraint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from schemas import SCHEMAS


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("-k", "num_draft_tokens", default=4, show_default=True)
@click.option("--seeds", default=5, show_default=True, help="Texts of each schema.")
@click.option("--drafter", default="model", show_default=True)
@click.option("--temperature", default=1.0, show_default=True)
def main(
    bundle: str | None, num_draft_tokens: int, seeds: int, drafter: str, temperature: float
) -> None:
    """Print the masks' time, and the rounds' beside it."""
    pipeline = load(bundle, threads=1)
    seconds: list[float] = []
    made = Constraint.banned

    def timed(self: Constraint, history: Any) -> Any:
        computed = len(self._masks), list(self._masks)
        start = time.perf_counter()
        found = made(self, history)
        if (len(self._masks), list(self._masks)) != computed:
            seconds.append(time.perf_counter() - start)
        return found

    Constraint.banned = timed  # type: ignore[method-assign]
    rounds, whole, tokens, passes, forced = 0, 0.0, 0, 0, 0
    for schema in SCHEMAS:
        for seed in range(seeds):
            stats = pipeline.generate(
                "data = ",
                80,
                temperature,
                seed=seed,
                num_draft_tokens=num_draft_tokens,
                drafter=drafter,
                json_schema=schema,
            ).stats
            rounds, tokens = rounds + stats.num_rounds, tokens + stats.num_new_tokens
            whole += stats.decode_seconds
            passes += stats.num_draft_passes
            forced += stats.accepted_by_source.get("grammar", 0)
    low, middle, high = np.percentile(seconds, [10, 50, 90]) * 1e6
    print(f"a mask: {middle:.0f} us (10% to 90%: {low:.0f} to {high:.0f}), of {len(seconds)}")
    print(f"a round: {len(seconds) / rounds:.2f} masks, {sum(seconds) / rounds * 1e6:.0f} us")
    print(f"of {whole / rounds * 1e6:.0f} us, {tokens / rounds:.2f} tokens a round")
    print(f"{passes / rounds:.2f} draft passes a round, {whole / tokens * 1e6:.0f} us a token")
    print(f"{forced / tokens:.1%} of the tokens were forced, and drafted so")


if __name__ == "__main__":
    main()
