"""Requests without models: rounds whose costs are a table's and whose acceptances are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from specedge.runtime.planning.cost_table import CostTable, ModeCosts, RoundCosts
from specedge.runtime.planning.planner import DraftOption, Planner

Accepts = Callable[[str, int, random.Random], bool]  # a drafter's token at a place of the text


def table(
    draft: float = 0.09,
    row: float = 0.07,
    rows: int = 17,
    prefill: float = 0.01,
    host: float = 0.0,
    prior: dict[str, float] | None = None,
    unit: float = 1.0,
) -> CostTable:
    """Costs in passes of the target: of a draft pass, of a row more, of a token that is read, and
    of the host in a round. A pass takes `unit` seconds.
    """
    mode = ModeCosts(
        target=(tuple(unit * (1 + row * t) for t in range(rows)),),
        draft=(tuple(unit * draft * k for k in range(1, rows)),),
        prefill=(unit * prefill,),
        host=unit * host,
        token=0.0,
        acceptance=prior or {},
    )
    return CostTable("tune", (0,), tuple(range(1, rows + 1)), mode, mode, threads=0)


def untuned(draft: float = 0.09) -> CostTable:
    """The same costs as they are measured at load, which tells no acceptance."""
    return replace(table(draft), origin="load")


def constant(chance: float) -> Accepts:
    """Every token is accepted with the same chance."""
    return lambda drafter, place, rng: rng.random() < chance


class VirtualRequest:
    """A request of `tokens` new tokens after a prompt; `seconds` is what it took by the table.

    `fixed` is a drafter and its K; without it a planner chooses, and is left in `planner`.
    """

    def __init__(
        self,
        costs: CostTable,
        accepts: Accepts,
        tokens: int = 128,
        prompt: int = 50,
        fixed: tuple[str, int] | None = None,
        copies: Callable[[int], int] | None = None,
        seed: int = 0,
    ) -> None:
        self.costs = costs.at(prompt, True)  # the same at each length
        self.accepts = accepts
        self.copies = copies or (lambda place: 0)
        self.rng = random.Random(seed)
        self.fixed = fixed
        self.planner = Planner(costs, temperature=0.0)
        self.place, self.end, self.behind = prompt, prompt + tokens, prompt
        self.seconds = 0.0
        self.choices: list[tuple[str, int]] = []
        while self.place < self.end:
            self._round()
        self.seconds *= tokens / (self.place - prompt)

    def _round(self) -> None:
        left, ready = self.end - self.place, self.copies(self.place)
        if self.fixed is None:
            options = [DraftOption("model", max_model_tokens=99, num_unread=self.behind)]
            options += [DraftOption("suffix", "suffix", num_free=ready)] if ready else []
            choice = self.planner.choose(options, self.place)
            drafter, k = choice.drafter, min(choice.num_draft_tokens, left)
        else:
            drafter, k = self.fixed
            k = min(k, left, ready) if drafter == "suffix" else min(k, left)
        accepted = 0
        while accepted < k and self.accepts(drafter, self.place + accepted, self.rng):
            accepted += 1
        self._pay(drafter, k, accepted, self.costs)
        self.choices.append((drafter, k))
        if self.fixed is None:
            self.planner.record(choice, [drafter] * k, accepted)
            if ready and drafter != "suffix":
                accepted = self.accepts("suffix", self.place, self.rng)
                self.planner.estimate("suffix").record(0, accepted)
        self.place += accepted + 1

    def _pay(self, drafter: str, k: int, accepted: int, costs: RoundCosts) -> None:
        self.seconds += costs.verify[k]
        if drafter == "model" and k:
            self.seconds += costs.catch_up(self.behind) + costs.draft[k]
            self.behind = 2 if accepted == k else 1
        else:
            self.behind += accepted + 1


def seconds(costs: CostTable, accepts: Accepts, seeds: int = 12, **request: object) -> float:
    """Return the total of several requests."""
    return sum(
        VirtualRequest(costs, accepts, seed=seed, **request).seconds  # type: ignore[arg-type]
        for seed in range(seeds)
    )
