"""Execution rules of CUDA graph capture: one thread for each GPU, and a lock around captures.

ONNX Runtime's CUDA provider keeps captured graphs and cuBLAS handles per thread, and does not free
those of threads that have ended. With one thread per request, every request would capture every
pass length again, so all passes of a GPU run in one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any

_Result = SimpleQueue[BaseException | None]
_Task = tuple[Any, Any, Any, _Result]
_lock = threading.Lock()  # `cache` may call a function concurrently


class CaptureLock:
    """Lock that is shared by allocations and copies, and exclusive for a graph capture.

    During a capture, an allocation, a copy or the end of a session in another thread fails and
    invalidates the capture. Not reentrant: a waiting capture blocks new holders.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_captured, self._num_shared = False, 0

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock alone, for a capture."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_captured)
            self._is_captured = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_shared)
            yield
        finally:
            with self._changed:
                self._is_captured = False
                self._changed.notify_all()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Hold the lock for an operation that would break a capture."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_captured)
            self._num_shared += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_shared -= 1
                self._changed.notify_all()


def capture_lock(index: int) -> CaptureLock:
    """Return the capture lock of a GPU."""
    with _lock:
        return _create_capture_lock(index)


@cache
def _create_capture_lock(index: int) -> CaptureLock:
    return CaptureLock()


def run(index: int, session: Any, binding: Any, options: Any) -> None:
    """Run a binding in the thread of a GPU and wait for its end; re-raise its exception."""
    result: _Result = SimpleQueue()
    with _lock:
        tasks = _start_thread(index)
    tasks.put((session, binding, options, result))
    try:
        error = result.get()
    except BaseException:  # an interrupt; the pass continues and uses memory
        result.get()
        raise
    if error is not None:
        raise error


@cache
def _start_thread(index: int) -> SimpleQueue[_Task]:
    tasks: SimpleQueue[_Task] = SimpleQueue()
    name = f"specedge-gpu-{index}"
    threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True).start()
    return tasks


def _serve(tasks: SimpleQueue[_Task]) -> None:
    while True:
        result, error = _run_task(*tasks.get())
        result.put(error)
        del result, error  # its traceback references the session


def _run_task(
    session: Any, binding: Any, options: Any, result: _Result
) -> tuple[_Result, BaseException | None]:
    """Run one pass in a separate frame, which releases its references before the report."""
    try:
        session.run_with_iobinding(binding, options)
    except BaseException as error:
        return result, error
    return result, None
