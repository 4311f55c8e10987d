"""Function calling: declarations, grammars, and parsing of calls in generated text."""
