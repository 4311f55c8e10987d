"""Audit of a bundle on the machine at hand: the checks of `specedge verify`. Needs SciPy."""
