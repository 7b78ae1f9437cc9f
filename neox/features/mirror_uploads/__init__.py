"""Uploads of checkpoints to a mirror."""
