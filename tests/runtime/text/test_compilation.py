"""Compilations of grammars, of which some take long."""

import threading
import time

from specedge.runtime.text import compilation
from specedge.runtime.text.compilation import Compilations


def test_compilation_permit_is_released_after_earlier_overrun(monkeypatch):
    for name, value in {"PATIENCE": 0.01, "MAX_CONCURRENT": 1, "MAX_OVERRUNS": 1}.items():
        monkeypatch.setattr(compilation, name, value)
    compilations, ends = Compilations(), [threading.Event() for _ in range(2)]
    has_begun = threading.Event()

    def slow(i):
        if i:
            has_begun.set()
        return ends[i].wait(60)

    first = compilations.begin(lambda: slow(0))
    second = compilations.begin(lambda: slow(1))  # begins when the first one overruns
    assert has_begun.wait(30)
    time.sleep(0.05)  # now it would overrun, too, but one already does
    ends[0].set()
    assert first.result(30)
    assert compilations.begin(lambda: "quick").result(10) == "quick"
    ends[1].set()
    assert second.result(30)
