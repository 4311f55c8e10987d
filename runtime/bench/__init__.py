"""Measuring a loaded pipeline."""
