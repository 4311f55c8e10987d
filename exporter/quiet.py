"""Libraries are silent and their errors ours, so that a user sees only what specedge says."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator

from transformers.utils import logging as transformers_logging

from specedge.errors import SpecEdgeError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, log lines, progress bars or prints of torch, transformers and onnxscript."""
    bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    disabled = logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.CRITICAL)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def explained(
    kind: type[SpecEdgeError],
    before: str,
    after: str = "",
    *,
    of: tuple[type[Exception], ...] = (Exception,),
    said: Callable[[Exception], str] | None = None,
) -> Iterator[None]:
    """Turn other libraries' errors into ours, which say in one line what went wrong in them."""
    try:
        yield
    except SpecEdgeError:
        raise
    except of as error:
        raise kind(f"{before}{(said or one_line)(error)}{after}") from error


def one_line(error: BaseException) -> str:
    """The first line of an error's message that says something, and the next one behind a colon."""
    lines = [s for line in str(error).splitlines() if (s := line.strip())]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return (text or type(error).__name__)[:200].rstrip(".")
