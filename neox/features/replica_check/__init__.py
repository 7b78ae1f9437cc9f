"""Comparison of the weights of data ranks."""
