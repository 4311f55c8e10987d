"""Folders that one worker of a run of tests builds for all workers."""

import os

from filelock import FileLock


def run_folder(tmp_path_factory, name):
    """Return a folder of this run of tests, which all workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def build_once(folder, build):
    """Return `folder`, for which one worker calls `build(folder)` while the others wait."""
    done = folder.with_name(f"{folder.name}.done")
    with FileLock(done.with_suffix(".lock")):
        if not done.exists():
            build(folder)
            done.touch()
    return folder
