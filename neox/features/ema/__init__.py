"""Exponential moving average of the trained weights."""
