"""Compatibility of draft and target tokenizers, and the tokenizer data of a bundle."""
