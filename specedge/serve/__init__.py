"""A server with OpenAI's API over a pipeline's slots."""
