"""The speculative decoding loop."""
