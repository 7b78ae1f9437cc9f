"""Logits of a fixed input that a checkpoint carries."""
