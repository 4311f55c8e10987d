"""Pages of mapped files are given back, and what was written to them is not."""

import time

import numpy as np
import pytest

from specedge.exporter import resident

SIZE = 128 << 20


@pytest.fixture
def file(tmp_path):
    if not resident._MAPPINGS.exists():
        pytest.skip("no /proc")
    path = tmp_path / "file"
    with path.open("wb") as opened:
        opened.write(b"specedge" * (SIZE // 8))
    return path


def settled(wanted, pause=0.01):
    """Whether something comes true within some seconds."""
    for _ in range(1000):
        if wanted():
            return True
        time.sleep(pause)
    return False


def test_pages_of_mapped_files_are_given_back_and_read_again(file):
    mapped = np.memmap(file, np.uint8, "r")
    before = int(mapped.sum(dtype=np.int64))
    held = resident._mapped()
    assert held > SIZE
    with resident.bounded(limit=held - SIZE // 2, pause=0.01):
        assert settled(lambda: resident._mapped() < held - SIZE // 2)
    assert int(mapped.sum(dtype=np.int64)) == before


def test_pages_below_the_limit_stay(file):
    mapped = np.memmap(file, np.uint8, "r")
    mapped.sum()
    held = resident._mapped()
    with resident.bounded(limit=held + SIZE, pause=0.01):
        time.sleep(0.1)
    assert resident._mapped() > held - SIZE // 2


def test_a_mapping_that_was_written_to_keeps_what_was_written(file):
    mapped = np.memmap(file, np.uint8, "c")
    mapped.sum()
    mapped[SIZE // 2] = 7
    with resident.bounded(limit=0, pause=0.001):
        time.sleep(0.1)
    assert mapped[SIZE // 2] == 7
    assert (mapped.ctypes.data, mapped.ctypes.data + SIZE) not in [*resident._untouched()]
