"""The scheduler is fair: the longest waiting request has the next turn."""

import threading
import time

import pytest

from specedge.runtime.requests.slots import FairLock
from threads import in_threads


def test_turns_are_fair():
    turns, order = FairLock(), []

    def run(name):
        for _ in range(50):
            with turns:
                order.append(name)
                time.sleep(0.0002)

    in_threads(*(lambda name=name: run(name) for name in "abc"))
    middle = order[30:100]
    assert all(len({*middle[i : i + 3]}) == 3 for i in range(len(middle) - 2))


@pytest.mark.parametrize("has_it", [False, True])
def test_an_interrupted_waiter_releases_its_turn(monkeypatch, has_it):
    turns, lock = FairLock(), threading.Lock

    class Interrupted:
        def __init__(self):
            self.lock, self.times = lock(), 0

        def acquire(self):
            self.times += 1
            if self.times == 1:
                return self.lock.acquire()
            if has_it:  # the turn came just before the interrupt
                turns.__exit__()
            raise KeyboardInterrupt

        def release(self):
            self.lock.release()

    turns.__enter__()
    monkeypatch.setattr(threading, "Lock", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        turns.__enter__()
    monkeypatch.undo()
    if not has_it:
        turns.__exit__()
    assert in_threads(turns.__enter__) == [None]


def test_a_released_turn_goes_to_the_next_waiter():
    turns, order = FairLock(), []

    def other():
        with turns:
            order.append("other")

    with turns:
        with turns.released():
            other()
        order.append("again")
        assert turns.is_taken
    assert order == ["other", "again"]
    assert not turns.is_taken


def test_interrupt_during_turn_reacquisition_is_raised_in_holder(monkeypatch):
    turns, enter, interrupted = FairLock(), FairLock.__enter__, []

    def interrupting(self):
        if len(interrupted) == 1:
            interrupted.append(1)
            raise KeyboardInterrupt
        interrupted.append(0)
        return enter(self)

    monkeypatch.setattr(FairLock, "__enter__", interrupting)
    with pytest.raises(KeyboardInterrupt), turns, turns.released():
        pass
    assert not turns.is_taken
    assert turns.num_begun == 2
