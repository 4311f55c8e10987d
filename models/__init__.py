"""The embedded pair, which works offline: a bundle in `embedded`; see README.md for its making."""
