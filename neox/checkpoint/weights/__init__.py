"""Weights on disk: the files, and reading them at any tensor-parallel degree (`CheckpointReader`)."""
