"""Drafters: draft model, suffix decoding, n-grams, chains and custom drafters."""
