"""The thread in which all passes of a GPU run, whichever thread asks for them.

ONNX Runtime's CUDA provider keeps captured graphs and cuBLAS's handles by thread, and those of a
thread that has ended stay: with a thread a request, as a server has them, every request would
capture every pass length again.
"""

from __future__ import annotations

import threading
from functools import cache
from queue import SimpleQueue
from typing import Any

_Answers = SimpleQueue[BaseException | None]
_Task = tuple[Any, Any, Any, _Answers]


def run(index: int, session: Any, binding: Any, options: Any) -> None:
    """Run a binding in the thread of a GPU, and wait for its end. Raises what it raises."""
    answers: _Answers = SimpleQueue()
    _tasks_of(index).put((session, binding, options, answers))
    try:
        error = answers.get()
    except BaseException:  # an interrupt; the pass goes on, and uses memory
        answers.get()
        raise
    if error is not None:
        raise error


_lock = threading.Lock()


def _tasks_of(index: int) -> SimpleQueue[_Task]:
    with _lock:
        return _started(index)


@cache
def _started(index: int) -> SimpleQueue[_Task]:
    tasks: SimpleQueue[_Task] = SimpleQueue()
    name = f"specedge-gpu-{index}"
    threading.Thread(target=_serve, args=(tasks,), name=name, daemon=True).start()
    return tasks


def _serve(tasks: SimpleQueue[_Task]) -> None:
    while True:
        answers, error = _answer(*tasks.get())
        answers.put(error)
        del answers, error  # with the session that its traceback holds


def _answer(
    session: Any, binding: Any, options: Any, answers: _Answers
) -> tuple[_Answers, BaseException | None]:
    """What a pass gave; none of it is held when its answer is told."""
    try:
        session.run_with_iobinding(binding, options)
    except BaseException as error:
        return answers, error
    return answers, None
