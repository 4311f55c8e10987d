"""Benchmarks of a loaded pipeline."""
