"""Mixtures of datasets: blends, stages, and the record of what a run has read."""
