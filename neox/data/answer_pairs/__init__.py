"""Answers to prompts in pairs, and the rows that hold them."""
