"""Numerical verification of exported graphs against the PyTorch model."""
