"""Exports to Hugging Face in training."""
