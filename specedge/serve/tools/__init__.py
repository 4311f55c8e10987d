"""Functions that the model may call: declared, forced by a grammar, read from its text."""
