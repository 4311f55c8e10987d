"""Remaining time of an export, from predicted and measured step times."""

import pytest

from specedge.exporter import Progress

PREDICTED = {"Loading": 10.0, "Running": 40.0, "Writing": 50.0}


class Clock:
    """A clock that tests advance."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def progress(clock):
    progress = Progress(clock)
    progress.predicted = PREDICTED
    return progress


def take(progress, clock, description, seconds):
    with progress.step(description):
        clock.seconds += seconds


def test_nothing_is_predicted_without_predicted_steps(clock):
    progress = Progress(clock)
    with progress.step("Loading", 10) as advance:
        clock.seconds += 5
        advance(5)
        assert progress.remaining() is None
    assert progress.fraction() == 0


def test_remaining_time_counts_down_within_a_step(progress, clock):
    assert progress.remaining() == 100
    with progress.step("Loading"):
        clock.seconds += 4
        assert progress.remaining() == 96
        clock.seconds += 16  # longer than predicted: later steps are still to come
        assert progress.remaining() == 90


@pytest.mark.parametrize("factor", [0.5, 1, 3])
def test_measured_steps_scale_predictions_of_later_ones(progress, clock, factor):
    for description in ("Loading", "Running"):
        take(progress, clock, description, factor * PREDICTED[description])
    with progress.step("Writing"):
        remaining = progress.remaining()
        assert min(50, factor * 50) <= remaining <= max(50, factor * 50)
        assert remaining == pytest.approx(factor * 50, rel=0.25)
        assert progress.fraction() == pytest.approx(0.5, abs=0.06)


def test_amounts_predict_the_rest_of_their_step(progress, clock):
    with progress.step("Running", 100) as advance:
        clock.seconds += 60
        advance(75)
        assert progress.remaining() == pytest.approx(60 / 3 + 50)


def test_step_inside_another_adds_its_own_rest_and_time(progress, clock):
    with progress.step("Loading"):
        clock.seconds += 1
        with progress.step("Downloading", 1000) as advance:
            clock.seconds += 30
            assert progress.remaining() == 100
            advance(500)
            assert progress.remaining() == 30 + 100
        clock.seconds += 2
        assert progress.remaining() == 97
    assert progress.seconds == {"Downloading": 30, "Loading": 3}


def test_skipped_steps_are_no_longer_predicted(progress, clock):
    take(progress, clock, "Loading", 10)
    with progress.step("Writing"):
        assert progress.remaining() == 50


def test_repeated_step_is_predicted_once(progress, clock):
    take(progress, clock, "Loading", 8)
    assert progress.remaining() == 92
    with progress.step("Loading"):
        clock.seconds += 2
        assert progress.remaining() == 90
    assert progress.seconds == {"Loading": 10}


def test_fraction_never_decreases_and_ends_at_one(progress, clock):
    fractions = [progress.fraction()]
    for description, seconds in (("Loading", 1), ("Running", 400), ("Writing", 900)):
        with progress.step(description):
            for _ in range(10):
                clock.seconds += seconds / 10
                fractions.append(progress.fraction())
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
