"""Bits per byte of the training loss."""
