"""Checkpoints as files, without torch: names, manifests, contents, and which one of a directory counts."""
