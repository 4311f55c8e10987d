"""Sampling: distributions from logits, and tokens from distributions."""
