"""This process as a driver of Ray: connected to a cluster, and quiet."""

from __future__ import annotations

import logging
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from specedge.errors import SpecEdgeError

ANY = "any"  # the address where none is given
PORT = 6379  # of a cluster's head, where an address has none
PATIENCE = 10.0  # seconds for a head to accept a connection


@contextmanager
def connected(address: str) -> Iterator[None]:
    """A cluster, for as long; signals stay ours."""
    from specedge.ray import imported

    ray = imported("ray")
    imported("ray.data")
    named = os.environ.get("RAY_ADDRESS") if address == ANY else address
    _check_reachable(named)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(named, log_to_driver=False, logging_level=logging.CRITICAL)
    except (OSError, RuntimeError, ValueError) as error:  # no cluster, or of another version
        where = named or "this machine"
        raise SpecEdgeError(f"no Ray cluster that takes us at {where}: {error}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Ray itself would try for minutes."""
    if address in (None, "auto", "local"):
        return
    assert address is not None
    if "://" in address:
        raise SpecEdgeError(
            f"{address} is no HOST:PORT of a cluster's head; run the command on one of its "
            "machines, as 'ray job submit' does"
        )
    host, _, port = address.rpartition(":") if ":" in address else (address, "", str(PORT))
    try:
        socket.create_connection((host, int(port)), PATIENCE).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecEdgeError(
            f"no Ray cluster at {address}: {reason}; start one with 'ray start --head', or leave "
            "the address out"
        ) from error


class Heard(logging.Handler):
    """What Ray logs, of which the last error's last line may be told."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = "see Ray's logs"

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.last = last_line(record.exc_info[1])


def last_line(error: BaseException) -> str:
    """What an error says after the tracebacks that Ray puts into it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


@contextmanager
def quiet() -> Iterator[Heard]:
    """Keep off what Ray prints and logs of its own accord; lines are written to the real stdout."""
    heard, before = Heard(), {}
    loggers = [logging.getLogger(name) for name in ("ray", "ray.data")]
    for logger in loggers:
        before[logger] = logger.handlers, logger.level, logger.propagate
        logger.handlers, logger.propagate = [heard], False
        logger.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield heard
    finally:
        for logger, (logger.handlers, level, logger.propagate) in before.items():
            logger.setLevel(level)
