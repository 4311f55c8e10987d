"""The promise that makes speculative decoding plain decoding bit for bit, on this machine's CPU.

Another CPU takes other kernels. Where these tests fail, near-ties may be decided otherwise than by
plain decoding; docs/exactness.md says what then holds.
"""

import pytest

from rows import LENGTHS, dependent_lengths
from specedge.bundle.graph_variants import OPS
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.invariance import is_invariant


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("ops", OPS)
def test_passes_are_batch_invariant(pipeline, role, ops):
    """Recorded lengths, and those between recorded ones that a verify pass may have."""
    entry = pipeline.bundle.models[role]
    assert entry.parity[ops].invariant_lengths == LENGTHS
    model = OrtModel(pipeline.bundle, entry, Device(), ops)
    assert dependent_lengths(model, range(1, 19), 40) == []
    assert dependent_lengths(model, LENGTHS[7:], 300) == []
    assert all(is_invariant(length, LENGTHS) for length in range(1, 19))


def test_lengths_next_to_a_failed_one_are_not_invariant():
    assert not is_invariant(4, (1, 2, 3, 9, 64))
    assert not is_invariant(4, (1, 2, 5, 9, 64))
    assert not is_invariant(2, (1, 3, 5, 9, 64))
    assert not is_invariant(5, (2, 3, 5, 9))
    assert not is_invariant(2, ())
    assert is_invariant(2, (1, 2))
