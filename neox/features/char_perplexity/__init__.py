"""Perplexities per character."""
