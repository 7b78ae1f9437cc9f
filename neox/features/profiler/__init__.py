"""Profiler of some training steps."""
