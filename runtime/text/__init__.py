"""Prompts, chat templates, grammars and detokenization."""
