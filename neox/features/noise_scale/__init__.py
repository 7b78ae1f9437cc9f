"""Gradient noise scale."""
