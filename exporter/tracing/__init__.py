"""Tracing of a PyTorch decoder to a graph over fixed KV-cache buffers."""
