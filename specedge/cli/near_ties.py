"""What to say of greedy choices within the device's noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specedge.cli.terminal import counted

if TYPE_CHECKING:
    from specedge.runtime.requests.stream import Generation

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
    if not ties:
        return told
    places = ", ".join(str(tie.position) for tie in ties[:_SHOWN])
    more = ", ..." if len(ties) > _SHOWN else ""
    line = (
        f"{counted(len(ties), 'near-tie')} within the device's noise of {generation.noise:.0e}"
        f" (position{'' if len(ties) == 1 else 's'} {places}{more})"
    )
    if not exact:
        return [*told, f"{line}: plain decoding may choose otherwise; --exact decides as it does"]
    passes, seconds = stats.num_exact_passes, stats.exact_seconds
    how = f"decided as plain decoding does by {passes} more passes in {seconds:.2f} s"
    return [*told, f"{line}, {how}"]
