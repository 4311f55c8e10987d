"""Draws figures to files, the same bytes each time, with matplotlib, which is optional."""

from __future__ import annotations

import importlib
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specedge.errors import MissingExtraError, SpecEdgeError

if TYPE_CHECKING:
    from specedge.cli.figures import Figure

# Okabe and Ito's colours, which are told apart with any colour vision; lines differ too.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")
_LINES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_MARKS = ("o", "s", "^", "D", "v", "P")


def check_folder(folder: str, form: str, overwrite: bool) -> None:
    """Refuse, before any work, a folder that cannot be or files that must not be replaced."""
    from specedge.cli.figures import NAMES

    place = Path(os.path.abspath(folder))
    if not folder or (place.exists() and not place.is_dir()):
        raise click.UsageError(f"'{folder}' is no folder; name one for --figures")
    if not place.parent.is_dir():
        raise click.UsageError(f"{folder} lies in no folder; make that first")
    for name in NAMES:
        path = Path(folder, f"{name}.{form}")
        if os.path.lexists(path) and not overwrite:
            raise click.UsageError(f"{path} exists; name another folder, or give --overwrite")


def draw(folder: str, form: str, overwrite: bool) -> list[Path]:
    """Draw every figure into a folder and say where; none is written before all are drawn.

    Raises MissingExtraError without matplotlib, and OSError.
    """
    from specedge.cli.figures import all_figures

    drawn = {Path(folder, f"{one.name}.{form}"): drawn_bytes(one, form) for one in all_figures()}
    check_folder(folder, form, overwrite)  # drawing took a while
    Path(folder).mkdir(exist_ok=True)
    for path, content in drawn.items():
        _write(path, content)
    return list(drawn)


def drawn_bytes(figure: Figure, form: str) -> bytes:
    """The file of a figure, "svg" or "png". Raises MissingExtraError without matplotlib."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever style the user has
        matplotlib.rcParams["svg.hashsalt"] = "specedge"
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["axes.spines.top"] = matplotlib.rcParams["axes.spines.right"] = False
        canvas = matplotlib.figure.Figure(figsize=(8, 4.4), dpi=150, layout="constrained")
        _fill(canvas.subplots(), figure)
        # Nothing of the day or of matplotlib's version.
        hidden = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
        file = io.BytesIO()
        canvas.savefig(file, format=form, metadata=hidden[form])
    return file.getvalue()


def _fill(axes: Any, figure: Figure) -> None:
    for i, curve in enumerate(figure.curves):
        axes.plot(
            curve.x,
            curve.y,
            label=curve.label,
            color=_COLOURS[i],
            linestyle=_LINES[i],
            marker=_MARKS[i] if curve.marks else None,
            markersize=4,
            drawstyle="steps-pre" if curve.steps else "default",
        )
    axes.set_title(figure.title, size=11)
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    axes.grid(color="0.9")
    axes.figure.legend(loc="outside right upper", frameon=False)


def _matplotlib() -> Any:
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingExtraError(
            'drawing needs matplotlib; run: pip install "specedge[plot]"'
        ) from error
    except ValueError as error:  # MPLBACKEND names none
        raise SpecEdgeError(f"matplotlib does not start: {error}") from error


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
