"""Cases of a parametrized test that run only with `-m slow`, or with `--exhaustive`."""

import pytest


def slow(*values):
    """Return a case that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values):
    """Return a case that runs only with `--exhaustive`."""
    return pytest.param(*values, marks=pytest.mark.slow(exhaustive=True))
