"""OpenAI-compatible HTTP server of a pipeline."""
