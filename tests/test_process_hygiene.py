"""Importing specedge and loading a bundle do not change process state."""

import os
import subprocess
import sys

import pytest

from specedge.telemetry import disabled_telemetry

STATE = """if True:
    import logging, os, signal, sys, threading, warnings
    sys.argv[0] = "specedge"  # as of an app of that name

    def state():
        loggers = logging.root.manager.loggerDict.values()
        return {
            "signal handlers": [signal.getsignal(number) for number in signal.valid_signals()],
            "logging": (logging.root.manager.disable, logging.root.level, logging.root.handlers),
            "loggers": [name for name, log in logging.root.manager.loggerDict.items()
                        if isinstance(log, logging.Logger) and (log.level or log.disabled)],
            "standard streams": [(s.st_dev, s.st_ino) for s in map(os.fstat, range(3))],
            "stream objects": (sys.stdin, sys.stdout, sys.stderr),
            "environment": dict(os.environ),
            "warning filters": list(warnings.filters),
            "exception hooks": (sys.excepthook, threading.excepthook),
            "current folder": os.getcwd(),
        }

    before = state()
    import specedge
    after_import = state()
    assert before == after_import, [k for k in before if before[k] != after_import[k]]
"""
LOAD = """
    redirected = []
    real = os.dup2

    def dup2(source, target, *rest, **options):
        redirected.append(target)
        return real(source, target, *rest, **options)

    os.dup2 = dup2
    import ctypes
    real_library, options = ctypes.CDLL, []

    class Library(real_library):
        def __getattr__(self, name):
            if name == "mallopt":
                options.append(name)
            return super().__getattr__(name)

    ctypes.CDLL = Library
    pipeline = specedge.load()
    assert pipeline.generate("import ", 3).text
    after_load = state()
    # Importing NumPy filters warnings and faults of its own.
    del before["warning filters"], after_load["warning filters"]
    assert before == after_load, [k for k in before if before[k] != after_load[k]]
    assert not redirected, "it redirects a standard stream while it loads"
    assert not options, "it changes malloc's options"
"""


def run(code):
    environment = dict(os.environ)
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )


def test_process_is_the_same_before_and_after():
    child = run(STATE + LOAD)
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""


def test_a_set_telemetry_variable_is_kept(monkeypatch):
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "0")
    with disabled_telemetry():
        assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "0"


def test_loggers_of_the_application_keep_working(caplog):
    pytest.importorskip("transformers")
    import logging

    from specedge.exporter.libraries import quiet

    libraries = [
        logging.getLogger(name) for name in ("torch.onnx.some", "transformers.models.some")
    ]
    libraries[0].setLevel(logging.INFO)
    with caplog.at_level(logging.INFO):
        with quiet():
            logging.getLogger("app").info("still here")
            for logger in (*libraries, logging.getLogger("onnxscript.new")):
                logger.error("not this")
        logging.getLogger("torch.onnx.some").info("again")
    assert [record.message for record in caplog.records] == ["still here", "again"]
    assert libraries[0].level == logging.INFO
