"""The directory of a run's checkpoints: commits, `latest`, which one is loaded, which are deleted or moved."""
