"""Silenced output and translated errors of the exporter's libraries."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator

from transformers.utils import logging as transformers_logging

from specedge.errors import SpecEdgeError

LIBRARIES = (
    *("accelerate", "gguf", "huggingface_hub", "onnx", "onnx_ir", "onnxscript", "optimum"),
    *("peft", "safetensors", "tokenizers", "torch", "transformers"),
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, log messages, progress bars and prints of the exporter's libraries.

    Warnings and prints of other threads are silenced as well.
    """
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    levels = {logger: logger.level for logger in _loggers()}
    for logger in levels:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _loggers() -> Iterator[logging.Logger]:
    """Yield the libraries' loggers that have an explicit level, or that others inherit from."""
    for name in LIBRARIES:
        yield logging.getLogger(name)
    for name, logger in [*logging.root.manager.loggerDict.items()]:
        root, _, rest = name.partition(".")
        if rest and root in LIBRARIES and isinstance(logger, logging.Logger) and logger.level:
            yield logger


@contextlib.contextmanager
def translate_errors(
    error_type: type[SpecEdgeError],
    before: str,
    after: str = "",
    *,
    catch: tuple[type[Exception], ...] = (Exception,),
    describe: Callable[[Exception], str] | None = None,
) -> Iterator[None]:
    """Translate other libraries' errors to an error of specedge with a one-line message.

    Args:
        error_type: Type of the raised error.
        before: Text before the description of the error.
        after: Text after it.
        catch: Exceptions to translate; errors of specedge pass unchanged.
        describe: Returns the description; by default the first line of the error's message.
    """
    try:
        yield
    except SpecEdgeError:
        raise
    except catch as error:
        raise error_type(f"{before}{(describe or first_line)(error)}{after}") from error


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message, and the next one after a colon."""
    lines = [s for line in str(error).splitlines() if (s := line.strip())]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return (text or type(error).__name__)[:200].rstrip(".")
