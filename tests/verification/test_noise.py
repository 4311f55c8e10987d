"""Measurement of differences between passes of different lengths."""

import numpy as np
import pytest

from auditing import Ticks
from specedge.runtime.sampling.logits import Logits
from specedge.verification.noise import distance, row_differences, size

TOKENS = list(range(64))


class TotalDependent:
    """Model whose last row differs where the total length has one residue modulo 8."""

    def __init__(self, residue):
        self.residue, self.length = residue, 0

    def truncate(self, length):
        assert length <= self.length
        self.length = length

    def forward(self, tokens):
        self.length += len(tokens)
        logits = np.ones((len(tokens), 2), np.float32)
        logits[-1, 1] += self.length < len(TOKENS) and self.length % 8 == self.residue
        return Logits(logits)

    def cache_rows(self, start, end):
        return [np.zeros((1, end - start, 1))]


@pytest.mark.parametrize("residue", range(8))
def test_passes_of_each_length_end_at_totals_of_all_residues(residue):
    lengths = (1, 2, 3, 4, 5, 8)
    differences = row_differences(TotalDependent(residue), TOKENS, lengths, Ticks(1000).budget)
    assert [t for t in lengths if differences[t].relative > 0] == [*lengths]


def test_differences_of_int8_rows_do_not_wrap_around():
    first, second = (np.array([x, 0], np.int8) for x in (-128, 127))
    assert distance(first, second) == 255
    assert size(first) == 128
