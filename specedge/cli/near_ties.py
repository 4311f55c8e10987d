"""What to say of greedy choices within the device's noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specedge.runtime.stream import Generation

_SHOWN = 9
_WORTH_TELLING = 0.1  # seconds


def lines(generation: Generation, exact: bool) -> list[str]:
    """A line if there was any, with `exact` what deciding them cost, and what measuring did."""
    ties, stats = generation.near_ties, generation.stats
    told = []
    if stats.noise_seconds >= _WORTH_TELLING:
        told.append(
            f"{stats.noise_seconds:.2f} s before it to measure this device's noise for K ="
            f" {generation.num_draft_tokens}, once a process"
        )
    return told + (_ties(generation, exact) if ties else [])


def _ties(generation: Generation, exact: bool) -> list[str]:
    ties, stats = generation.near_ties, generation.stats
    places = ", ".join(str(tie.position) for tie in ties[:_SHOWN])
    line = (
        f"{len(ties)} near-tie{'' if len(ties) == 1 else 's'} within the device's noise of"
        f" {generation.noise:.0e} (position{'' if len(ties) == 1 else 's'} {places}"
        f"{', ...' if len(ties) > _SHOWN else ''})"
    )
    if not exact:
        return [f"{line}: plain decoding may choose otherwise; --exact decides as it does"]
    passes, seconds = stats.num_exact_passes, stats.exact_seconds
    return [f"{line}, decided as plain decoding does by {passes} more passes in {seconds:.2f} s"]
