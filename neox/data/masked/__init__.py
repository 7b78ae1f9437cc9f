"""Samples of masked language modelling: pairs of sentences, and the tokens that are masked."""
