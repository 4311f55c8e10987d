"""What the figures of `specedge theory` show, as numbers; drawing.py draws them."""

from __future__ import annotations

from dataclasses import dataclass

from specedge.theory import formulas

NAMES = ("tokens", "best-k", "operations", "verify-cost")


@dataclass(frozen=True)
class Curve:
    """Points to join, in order, by lines or by steps up to each; `marks` shows them."""

    label: str
    x: list[float]
    y: list[float]
    steps: bool = False
    marks: bool = False


@dataclass(frozen=True)
class Figure:
    """One pair of axes, with what is in it."""

    name: str
    title: str
    x_label: str
    y_label: str
    curves: list[Curve]


def all_figures() -> list[Figure]:
    """The figures in the order of NAMES."""
    return [_tokens(), _best_k(), _operations(), _verify_cost()]


def _tokens() -> Figure:
    alphas = [i / 100 for i in range(101)]
    below = [alpha for alpha in alphas if alpha <= 0.9]
    limit = Curve(
        "any K, at most", below, [formulas.expected_tokens_limit(alpha) for alpha in below]
    )
    return Figure(
        "tokens",
        "Tokens a round (Leviathan et al. 2023, figure 2)",
        "acceptance rate α",
        "expected tokens a round",
        [
            limit,
            *(
                Curve(f"K = {k}", alphas, [formulas.expected_tokens(alpha, k) for alpha in alphas])
                for k in (10, 7, 5, 3, 1)
            ),
        ],
    )


def _best_k() -> Figure:
    alphas = [i / 200 for i in range(191)]
    return Figure(
        "best-k",
        "Best number of draft tokens (Leviathan et al. 2023, figure 3)",
        "acceptance rate α",
        "best K",
        [
            Curve(f"c = {c:g}", alphas, [float(formulas.best_k(a, c)) for a in alphas], steps=True)
            for c in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
        ],
    )


def _operations() -> Figure:
    lengths = range(11)
    return Figure(
        "operations",
        "Speed against operations at K = 0 to 10, drafting free (Leviathan et al. 2023)",
        "arithmetic operations over the target's alone",
        "speed-up",
        [
            Curve(
                f"α = {alpha:g}",
                [formulas.operations_factor(alpha, k) for k in lengths],
                [formulas.speedup(alpha, k, 0) for k in lengths],
                marks=True,
            )
            for alpha in (0.9, 0.8, 0.7, 0.6, 0.5)
        ],
    )


def _verify_cost() -> Figure:
    alpha, draft_cost, lengths = 0.8, 0.05, range(17)
    curves = []
    for slope in (0.0, 0.05, 0.1, 0.25, 0.8):
        costs = [1 + slope * k for k in lengths]
        label = f"v = 1 + {slope:g} K" if slope else "v = 1 (free)"
        curves.append(
            Curve(
                f"{label}: best K is {formulas.best_k(alpha, draft_cost, costs)}",
                [float(k) for k in lengths],
                [formulas.speedup(alpha, k, draft_cost, costs) for k in lengths],
                marks=True,
            )
        )
    return Figure(
        "verify-cost",
        f"Where verifying is not free (α = {alpha:g}, c = {draft_cost:g}, o = 0)",
        "draft tokens a round, K",
        "speed-up",
        curves,
    )
