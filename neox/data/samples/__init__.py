"""Samples of one token dataset for causal language modelling: the order of documents, and the rows cut from it."""
