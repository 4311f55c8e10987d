import numpy as np

from specedge.runtime.decoding.random_numbers import Uniforms, uniforms


def test_stream_is_splitmix64_as_published():
    # The first three outputs of the reference implementation for seed 1234567.
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert uniforms(1234567, 0, 3).tolist() == [(z >> 11) * 2.0**-53 for z in reference]


def test_numbers_can_be_skipped():
    assert uniforms(7, 5, 3).tolist() == uniforms(7, 0, 8)[5:].tolist()


def test_numbers_are_consecutive_across_calls():
    stream = Uniforms(7)
    taken = [number for count in (1, 9, 250, 3, 600, 0, 17) for number in stream.take(count)]
    assert taken == uniforms(7, 0, 880).tolist()


def test_numbers_are_in_the_unit_interval_and_uniform():
    numbers = uniforms(0, 0, 100_000)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square, 99 degrees, p > 1e-4


def test_any_integer_is_a_seed():
    assert uniforms(-1, 0, 2).tolist() == uniforms(2**64 - 1, 0, 2).tolist()
