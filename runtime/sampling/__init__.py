"""From logits to a distribution, and a token."""
