"""Embedded pair: a bundle in `embedded`, which works offline; README.md describes its training."""
