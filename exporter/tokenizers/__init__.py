"""Compatibility of draft and target tokenizers, and a bundle's tokenizer."""
