"""What was measured as rows, and rows as a table and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from environments import PEERS
from measuring import Run, Setting
from specedge.cli import svg

OURS = "specedge"


@dataclass(frozen=True)
class Row:
    """A peer in a precision and mode; without figures there is a reason.

    Times are of whole rounds, milliseconds for each new token. Ratios are medians over runs of the
    same round and prompt, above 1 where this row is faster than its own plain decoding, and where
    specedge in this precision and mode is faster than this row. `same_*` count prompts whose text
    is that of the peer's own plain decoding, and that of specedge's.
    """

    peer: str
    precision: str
    mode: str  # "plain" or "draft"
    reason: str = ""
    version: str = ""
    draft_precision: str | None = None
    threads: int | None = None
    k: int | str | None = None
    min_ms: float | None = None
    median_ms: float | None = None
    prefill_ms: float | None = None  # a prompt's, median
    decode_ms: float | None = None  # a token's, median
    load_seconds: float | None = None  # least
    memory_gb: float | None = None  # most
    speedup: float | None = None
    times_ours: float | None = None
    accepted: float | None = None  # share of drafted tokens
    same_as_plain: str = ""
    same_as_ours: str = ""


def row(
    setting: Setting,
    runs: Sequence[Run],
    load_seconds: float,
    peak_bytes: float,
    version: str,
) -> Row:
    """The figures of a setting among all runs."""
    mine = [run for run in runs if run.setting == setting]
    loaded = setting.loaded
    plain, ours = _plain(runs, loaded.peer, loaded.precision), _like(runs, setting)
    times = _round_times(mine)
    drafted = [run.drafted for run in mine if run.drafted]
    return Row(
        loaded.peer,
        loaded.precision,
        _mode(setting),
        version=version,
        draft_precision=loaded.draft_precision,
        threads=loaded.threads,
        k=setting.k,
        min_ms=min(times),
        median_ms=median(times),
        prefill_ms=1000 * median(run.prefill_seconds for run in mine),
        decode_ms=1000 * median(run.decode_seconds / max(len(run.tokens) - 1, 1) for run in mine),
        load_seconds=load_seconds,
        memory_gb=peak_bytes / 1e9,
        speedup=_ratio(plain, mine),
        times_ours=_ratio(mine, ours),
        accepted=sum(run.accepted or 0 for run in mine) / sum(drafted) if drafted else None,
        same_as_plain=_same(mine, plain),
        same_as_ours=_same(mine, _plain(runs, OURS, loaded.precision)),
    )


def _mode(setting: Setting) -> str:
    return "draft" if setting.k else "plain"


def _plain(runs: Sequence[Run], peer: str, precision: str) -> list[Run]:
    return [
        run
        for run in runs
        if run.setting.k == 0
        and (run.setting.loaded.peer, run.setting.loaded.precision) == (peer, precision)
    ]


def _like(runs: Sequence[Run], setting: Setting) -> list[Run]:
    """specedge's runs in a setting's precision and mode."""
    return [
        run
        for run in runs
        if run.setting.loaded.peer == OURS
        and run.setting.loaded.precision == setting.loaded.precision
        and _mode(run.setting) == _mode(setting)
    ]


def _round_times(runs: Iterable[Run]) -> list[float]:
    """Milliseconds a token of each round."""
    rounds: dict[int, list[Run]] = {}
    for run in runs:
        rounds.setdefault(run.round, []).append(run)
    return [
        1000 * sum(run.seconds for run in part) / sum(len(run.tokens) for run in part)
        for part in rounds.values()
    ]


def _ratio(above: Iterable[Run], below: Iterable[Run]) -> float | None:
    """The median of the ratios of times of the same round and prompt."""
    times = {(run.round, run.prompt): run.seconds for run in above}
    pairs = [(times.get((run.round, run.prompt)), run.seconds) for run in below]
    ratios = [top / bottom for top, bottom in pairs if top is not None]
    return median(ratios) if ratios else None


def _same(runs: Iterable[Run], others: Iterable[Run]) -> str:
    """On how many prompts all texts of both are one text: "3/4", "" without others."""
    texts: dict[int, set[tuple[int, ...]]] = {}
    wanted = {run.prompt: run.tokens for run in others}
    for run in runs:
        texts.setdefault(run.prompt, set()).add(run.tokens)
    if not wanted:
        return ""
    same = sum(found == {wanted.get(prompt)} for prompt, found in texts.items())
    return f"{same}/{len(texts)}"


COLUMNS = (
    "precision", "library", "draft", "K", "threads", "ms a token, least (median)", "prefill ms",
    "decode ms", "speed-up", "specedge is faster by", "accepted", "load s", "GB",
    "text is its plain", "text is specedge's",
)  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """Markdown, a row of the comparison a line."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_cells, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cells(row: Row) -> tuple[str, ...]:
    label = PEERS[row.peer].label
    if row.min_ms is None:
        draft = "yes" if row.mode == "draft" else "none"
        reason = row.reason.replace("|", "/")
        return (row.precision, label, draft, "", "", reason, *[""] * (len(COLUMNS) - 6))
    return (
        row.precision,
        label,
        (row.draft_precision or "") if row.k else "none",
        str(row.k or ""),
        str(row.threads),
        f"{row.min_ms:.1f} ({row.median_ms:.1f})",
        _figure(row.prefill_ms, 0),
        _figure(row.decode_ms, 1),
        _figure(row.speedup, 2) if row.k else "",
        _figure(row.times_ours, 2) if row.peer != OURS else "",
        _figure(row.accepted, 2),
        _figure(row.load_seconds, 1),
        _figure(row.memory_gb, 2),
        row.same_as_plain,
        row.same_as_ours if row.peer != OURS else "",
    )


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def picture(rows: Sequence[Row], title: str) -> str:
    """Bars as SVG: milliseconds a token, plain and speculative, the fastest first."""
    measured = [row for row in rows if row.min_ms is not None]
    precisions = list(dict.fromkeys(row.precision for row in measured))
    measured.sort(key=lambda row: (precisions.index(row.precision), row.min_ms or 0))
    bars = [(_label(row), _parts(row)) for row in measured]
    drawn = svg.bars(title, "ms a token", ("plain", "with the draft"), bars)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _label(row: Row) -> str:
    return f"{PEERS[row.peer].label} {row.precision}"


def _parts(row: Row) -> tuple[float, float]:
    assert row.min_ms is not None
    return (0.0, row.min_ms) if row.k else (row.min_ms, 0.0)
