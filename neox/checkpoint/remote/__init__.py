"""Checkpoints in object storage: uploads, downloads, and partial copies whose files are fetched when they are read."""
