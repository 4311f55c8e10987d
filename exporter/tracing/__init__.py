"""A PyTorch decoder becomes a graph over fixed KV-cache buffers."""
