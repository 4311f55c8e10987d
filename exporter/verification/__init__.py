"""Whether the exported graphs are the model."""
