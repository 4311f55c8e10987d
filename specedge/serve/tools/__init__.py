"""Function calling: declarations, grammars, and parsers of calls in generated text."""
