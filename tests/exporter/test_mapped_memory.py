"""Release of memory-mapped pages, except modified ones."""

import time

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

from specedge.exporter import mapped_memory
from specedge.exporter.checkpoint import weight_files

SIZE = 128 << 20


@pytest.fixture
def file(tmp_path):
    if not mapped_memory._MAPPINGS.exists():
        pytest.skip("no /proc")
    path = tmp_path / "file"
    with path.open("wb") as opened:
        opened.write(b"specedge" * (SIZE // 8))
    return path


def resident_bytes(array):
    """Return the resident bytes of the mapping that an array lies in."""
    for mapping in psutil.Process().memory_maps(grouped=False):
        start, end = (int(address, 16) for address in mapping.addr.split("-"))
        if start <= array.ctypes.data < end:
            return mapping.rss
    raise AssertionError("it is not mapped")


def settled(wanted, pause=0.01):
    """Return True if a condition holds within some seconds."""
    for _ in range(1000):
        if wanted():
            return True
        time.sleep(pause)
    return False


def test_pages_of_mapped_files_are_given_back_and_read_again(file):
    mapped = mapped_memory.map_file(file, 0, SIZE)
    before = int(mapped.sum(dtype=np.int64))
    held = mapped_memory._mapped_bytes()
    assert held > SIZE
    with mapped_memory.limit_mapped_memory(limit=held - SIZE // 2, pause=0.01):
        assert settled(lambda: mapped_memory._mapped_bytes() < held - SIZE // 2)
    assert int(mapped.sum(dtype=np.int64)) == before


def test_foreign_mappings_are_not_released(file):
    foreign = np.memmap(file, np.uint8, "r")
    own = mapped_memory.map_file(file, 0, SIZE)
    foreign.sum()
    own.sum()
    held = mapped_memory._mapped_bytes()
    with mapped_memory.limit_mapped_memory(limit=0, pause=0.01):
        assert settled(lambda: mapped_memory._mapped_bytes() < held - SIZE // 2)
        time.sleep(0.1)
    (bounds,) = [*mapped_memory._unmodified_mappings([own.ctypes.data])]
    assert resident_bytes(own) == 0 < resident_bytes(foreign) == SIZE
    assert bounds[0] == own.ctypes.data


def test_modified_mapping_is_not_released(file):
    mapped = mapped_memory.map_file(file, 0, SIZE)
    mapped.sum()
    mapped[SIZE // 2] = 7
    with mapped_memory.limit_mapped_memory(limit=0, pause=0.001):
        time.sleep(0.1)
    assert mapped[SIZE // 2] == 7
    assert [*mapped_memory._unmodified_mappings([mapped.ctypes.data])] == []


def test_checkpoint_mapping_lives_as_long_as_its_views(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(4, 4)}, path)
    before = len(mapped_memory._registered)
    view = weight_files.read_tensors("target", [path])["weight"][1:]
    assert len(mapped_memory._registered) == before + 1
    del view
    assert len(mapped_memory._registered) == before
