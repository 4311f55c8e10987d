"""Formulas of speculative decoding from the papers, and their extension to measured costs."""
