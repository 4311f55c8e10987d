"""Drafters."""
