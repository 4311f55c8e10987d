"""Sampling: logits processors, filters, distributions and log-probabilities."""
