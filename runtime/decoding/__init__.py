"""Speculative decoding: the loop, the accept rule, random numbers and near-ties."""
