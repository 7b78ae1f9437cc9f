"""Numbers by layer that show where a training becomes unstable."""
