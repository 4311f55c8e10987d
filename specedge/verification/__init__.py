"""Audit of a bundle on this machine: the checks of `specedge verify`. Requires SciPy."""
